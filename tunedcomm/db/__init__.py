"""Tuning databases. Start with `store.Database`, which opens one, adds trials and reads them back.

| module | subject |
|---|---|
| `store` | `Database`: one SQLite file or server |
| `layers`, `snapshot` | from every database of a process to the one table that dispatch reads |
| `kept` | the merged snapshot, kept for the next start |
| `transfer`, `stream`, `jsonl`, `manifest` | export, import and merge: one stream of records between two databases |
| `maintenance`, `diff` | check, prune, sum up and compare databases |
| `records`, `query` | stored rows as typed values, every value checked |
| `targets`, `values` | what needs no SQLAlchemy: places of databases, checks of stored values |
| `schema`, `migrations`, `rekey` | the tables, their revisions, and hashes that were replaced |
| `engine` | connections to files and servers, upgrades, errors that say what to do |
| `sidecar`, `misses` | files beside the user database: checks on this machine, problems not tuned, and calls of these |
"""
