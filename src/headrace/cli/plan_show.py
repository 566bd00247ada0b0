"""How `headrace plan` tells what it found: tables for people, one JSON object for machines."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from headrace.bench.report import print_json, print_table, show
from headrace.offline.plan_groups import Group, edges
from headrace.offline.plan_input import PlanInput
from headrace.offline.plan_report import Plan
from headrace.offline.planning.target import Target

_GROUPS_SHOWN = 12
_ERRORS_SHOWN = 5


def show_plan(
    result: Plan, given: PlanInput, target: Target, times: dict[str, float], output: Path | None, json: bool
) -> None:
    """Print a plan; that some lines are wrong is said on stderr too."""
    profile = target.profile
    about: dict[str, object] = {
        "device": profile.device_name,
        "device_measured": profile.measured,
        "kv_tokens": target.kv_tokens,
        "bad_lines": given.wrong,
        **{name: round(seconds, 3) for name, seconds in times.items()},
        "output": None if output is None else str(output),
    }
    if json:
        errors = [asdict(error) for error in given.errors]
        print_json({**result.summary(), **about, **result.by_group(given.names), "errors": errors})
    else:
        _tables(result, given, about)
        print(_words(result, profile.measured))
    if given.wrong:
        where = "" if output is None else f" and left out of {output}"
        total = given.wrong + len(given.ids)
        print(f"headrace: {given.wrong:,} of {total:,} lines are wrong: not planned{where}", file=sys.stderr)


def _tables(result: Plan, given: PlanInput, about: dict[str, object]) -> None:
    summary = result.summary()
    orders = summary.pop("orders")
    rows = [(name.replace("_", " "), show(value)) for name, value in (summary | about).items() if value is not None]
    print_table("Workload", ("", "value"), rows)
    shown = result.groups[:_GROUPS_SHOWN]
    names = [given.names[group.number] for group in shown]
    titles = ("group", "requests", "prompt tokens", "output tokens", "sharing", "density", "compute s", "memory s")
    facts = [
        (g.requests, g.prompt_tokens, g.output_tokens, g.sharing, g.density, g.compute_s, g.memory_s) for g in shown
    ]
    print_table("Groups of prompts", titles, [[name, *map(show, row)] for name, row in zip(names, facts)])
    _print_histograms(result.groups, names)
    columns = ("order", "predicted s", "share of optimum", "sharing kept", "steps", "preemptions")
    print_table("Orders", columns, [[name, *map(show, one.values())] for name, one in orders.items()])
    alone = [
        [name, f"{group.simulated:,}", *(f"{show(one.seconds)} ({one.share:.0%})" for one in group.orders.values())]
        for name, group in zip(names, shown)
        if group.orders
    ]
    title = "Groups by themselves: predicted s (share of optimum)"
    print_table(title, ("group", "requests simulated", *orders), alone)
    for error in given.errors[:_ERRORS_SHOWN]:
        print(f"line {error.line} is not planned: {error.message}")
    if given.wrong > _ERRORS_SHOWN:
        print(f"{given.wrong - _ERRORS_SHOWN:,} more lines are not planned; --json tells of the first hundred")


def _print_histograms(groups: Sequence[Group], names: Sequence[str]) -> None:
    """Requests by density: of all, and of each group shown; a column for every class that has any."""
    whole = [sum(column) for column in zip(*(group.histogram for group in groups))]
    used = [place for place, count in enumerate(whole) if count]
    titles = [f"< {edges()[0]:g}", *(f">= {edge:g}" for edge in edges())]
    counts = [("all", whole), *((name, group.histogram) for name, group in zip(names, groups))]
    rows = [[name, *(show(row[place]) if row[place] else "" for place in used)] for name, row in counts]
    print_table("Requests by density (compute / memory)", ("group", *(titles[place] for place in used)), rows)


def _words(result: Plan, measured: bool) -> str:
    """What the figures mean, in a line or two."""
    words = (
        "This device runs compute- and memory-bound work side by side: the blended order gains by overlap and sharing."
        if result.overlaps
        else "One pool of cores serves compute and memory work here, so their times add up: an order gains by sharing "
        "prefixes, hardly by blending."
    )
    if measured:
        return words
    advice = "`headrace bench calibrate` there makes a profile of what it really does."
    return f"{words} The device was not measured, these are numbers of its kind; {advice}"
