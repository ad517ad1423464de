"""One command that proves a machine: `python -m benchmarks.report`.

`steps` says what runs where, `runner` starts and stops programs, `verdicts` reads what they wrote, `collect`
goes through the steps, `state` is `report.json`, `comparison` has the ratios to committed rows, and `page`
writes `report.md` from `template.md`.
"""
