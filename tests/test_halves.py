"""The check that no number in PTX is wider than its half of a register."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from warploom import BackendError
from warploom.runtime.backend import HAS_TRITON
from warploom.runtime.halves import find_spilled_halves

# As it was compiled: of a thread's number, twice its last two bits.
SPILLED = """
\tmov.u32 \t%r6, %tid.x;
\tand.b32 \t%r16, %r6, 3;
\tmul.wide.u32 \t%rd46, %r6, 268435456;
\tcvt.u64.u32 \t%rd47, %r16;
\tshl.b64 \t%rd48, %rd47, 33;
\tor.b64 \t%rd49, %rd46, %rd48;
\tmov.b64 \t{_, %r18}, %rd49;
"""


def test_a_product_that_spills_is_found() -> None:
    (found,) = find_spilled_halves(SPILLED)
    assert found == "%r18 is the upper half of %rd46, mul.wide.u32 %r6, 268435456"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("mul.wide.u32 \t%rd46, %r6, 268435456", "cvt.u64.u32 \t%rd46, %r6"),  # 32 bits of a number
        ("or.b64 \t%rd49, %rd46", "or.b64 \t%rd49, %rd47"),  # the product is not in this half
        ("{_, %r18}", "{%r18, _}"),  # nor does it change the lower half
    ],
)
def test_halves_that_hold_their_numbers(before: str, after: str) -> None:
    assert before in SPILLED
    assert find_spilled_halves(SPILLED.replace(before, after)) == []


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's compiler")
@pytest.mark.parametrize(("with_assertions", "without"), [(SPILLED, ""), ("", ""), (SPILLED, SPILLED)])
def test_a_kernel_that_spills_is_not_launched(
    monkeypatch: pytest.MonkeyPatch, with_assertions: str, without: str
) -> None:
    import triton

    from warploom.runtime.build import Build

    compiled = []

    def compile_source(source: Any, target: Any, options: dict[str, Any]) -> Any:
        compiled.append(options["debug"])
        return SimpleNamespace(asm={"ptx": with_assertions if options["debug"] else without})

    build = Build(SimpleNamespace(__name__="a_kernel"), {}, {}, {}, {})
    monkeypatch.setattr(triton, "compile", compile_source)
    monkeypatch.setattr(Build, "source", lambda self: (SimpleNamespace(), {"debug": True}))
    if without:
        with pytest.raises(BackendError, match="compiles a_kernel wrongly"):
            build.compile()
    else:
        build.compile()
    assert compiled == ([True, False] if with_assertions else [True])
