"""JSON files that are whole at any time."""

import json
from pathlib import Path


def write(path: Path, value: object, indent: int = 1) -> None:
    """Writes beside the file, then puts it in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
    part.replace(path)
