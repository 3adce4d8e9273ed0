"""Writes the stub of what a session is asked to do, from the fields that the core reads.

python tests/stubs.py          # writes bindings/strata/_session_config.pyi anew
"""

from collections.abc import Mapping
from pathlib import Path

from strata import _core

STUB = Path(__file__).parent.parent / "bindings" / "strata" / "_session_config.pyi"
HEADER = '''\
"""What a session is asked to do; engine/config.hpp says what each field means. For type checkers
only: import these from _core.

Written by tests/stubs.py from bindings/config_fields.cpp.
"""

from typing import Literal, NotRequired, TypedDict
'''


def stub() -> str:
    """The text of the stub."""
    names, structs = _core.config_schema()
    literals = (
        f"{name} = Literal[{', '.join(map(_quoted, values))}]\n" for name, values in names.items()
    )
    classes = (_struct(name, fields) for name, fields in structs.items())
    return "\n".join([HEADER, "".join(literals), *classes])


def _quoted(text: str) -> str:
    return f'"{text}"'


def _struct(name: str, fields: Mapping[str, tuple[str, bool]]) -> str:
    lines = (
        f"    {field}: {type_ if required else f'NotRequired[{type_}]'}\n"
        for field, (type_, required) in fields.items()
    )
    return f"class {name}(TypedDict):\n{''.join(lines)}"


if __name__ == "__main__":
    STUB.write_text(stub())
