"""What Python and machine code tell each other about a unit."""

#: Fields of a job, all int64: address, size and number of the records; address of their sums; address of the flag by
#: which the unit is claimed; address of a C function `void (void *)` that copies the records (or 0) and its argument.
FIELDS = ("records", "size", "count", "sums", "flag", "copy", "argument", "answer")

#: Answers beside the number of the first record that is wrong: somebody else has claimed the unit; we have.
LATE, CLAIMED = -1, -2
