"""Jobs: a file of requests in, a file of answers out, each answered once whatever happens in between.

Knows neither HTTP nor templates: what a body means is an `Endpoint`'s business, which is handed in. May import `core`,
`front`, `perf` and `offline.planning`.
"""
