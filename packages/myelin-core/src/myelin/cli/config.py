"""``myelin config``: every setting, and the layer that set it."""

from __future__ import annotations

from myelin.cli.options import ANSWER_OPTIONS, RUN_OPTIONS, SERVE_OPTIONS, Invocation, with_options

NAME = "config"


@with_options(RUN_OPTIONS, ANSWER_OPTIONS, SERVE_OPTIONS)
def command(invocation: Invocation) -> int:
    """Show each setting with its value and where that came from; secrets are masked."""
    import json

    from myelin.cli.composition import assemble
    from myelin.cli.output import answer, answer_json, table
    from myelin.config.explain import explain

    settings = assemble(invocation).settings
    rows = explain(settings)
    if invocation.json:
        answer_json(
            {
                "file": str(settings.file) if settings.file is not None else None,
                "profile": settings.profile or None,
                "settings": [row.as_json() for row in rows],
            }
        )
    else:
        cells = [
            (row.key, json.dumps(row.value, ensure_ascii=False), row.layer + (f": {row.origin}" if row.origin else ""))
            for row in rows
        ]
        answer(table(("setting", "value", "from"), cells))
    return 0
