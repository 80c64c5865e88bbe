"""Arguments under the names of other libraries, and layouts of theirs: what to write here is said."""

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import warploom
from warploom import (
    LayoutWarning,
    UnknownArgumentError,
    flash_attention,
    linear_attention,
    lrpe_cosine,
    lrpe_rotate,
    tpa_attention,
    tpa_decode,
)
from warploom.distributed import context_parallel_attention, context_parallel_linear_attention
from warploom.runtime.names import OTHER_NAMES

QKV: Any = torch.randn(3, 1, 3, 2, 4)
CALLS: dict[Any, tuple[Any, ...]] = {
    flash_attention: (*QKV,),
    linear_attention: (*QKV,),
    lrpe_cosine: (QKV[0], torch.ones(4)),
    lrpe_rotate: (QKV[0], torch.ones(2)),
    tpa_attention: (*QKV,) * 2,
    tpa_decode: (*QKV,) * 2,
    context_parallel_attention: (*QKV, None),
    context_parallel_linear_attention: (*QKV, None),
}


def message(function: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(TypeError) as caught:
        function(*arguments, **named)
    assert type(caught.value) is UnknownArgumentError
    return str(caught.value)


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_unknown_arguments_say_what_to_write(function: Any) -> None:
    own = inspect.signature(function).parameters
    assert not {"_others", "_unknown"} & set(own)
    for other in {other for other, *_ in OTHER_NAMES} - set(own):
        said = message(function, *CALLS[function], **{other: None})
        meant = [(name, about) for o, name, about in OTHER_NAMES if o == other and (not name or name in own)]
        name, about = meant[0] if meant else ("", "there are " + ", ".join(own))
        close = "" if meant else re.search(r"did you mean (\w+)\?$", said)
        expected = f"did you mean {close[1]}?" if close else f"here it is {name}: {about}" if name else about
        assert said == f"{function.__name__}: there is no argument {other}; {expected}"
    last = list(own)[-1]
    assert message(function, *CALLS[function], **{last + "s": 1}).endswith(f"did you mean {last}?")
    assert str(len(CALLS[function]) + 1) in message(function, *CALLS[function], True) or "theta" in own


def test_arguments_by_position_say_what_to_write() -> None:
    assert message(flash_attention, *QKV, True) == (
        "flash_attention: q, k, v are given by position, and others by name, as in causal=True; got 4 by position"
    )
    cos, sin = torch.ones(2, 3, 2)
    assert message(lrpe_rotate, QKV[0], cos, sin).endswith("are not needed: lrpe_rotate(x, theta)")


def test_the_guide_has_the_names() -> None:
    text = (Path(__file__).parents[1] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`: )?(.*) \|$", text.partition("<!-- names:")[2], re.MULTILINE)
    assert tuple(rows[: len(OTHER_NAMES)]) == OTHER_NAMES


def test_heads_before_tokens_are_warned_of_once_a_line() -> None:
    q, k = torch.randn(2, 8, 30, 4), torch.randn(2, 2, 30, 4)  # (B, H, N, D)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            flash_attention(q, k, k, causal=True)
        flash_attention(q, k, k, causal=True)
    assert [(w.category, w.filename) for w in seen] == [(LayoutWarning, __file__)] * 2
    assert "flash_attention: 8 queries of 30 heads on 2 keys of 30 heads" in str(seen[0].message)
    assert "x.transpose(1, 2)" in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attention(q, k, k)
        flash_attention(*(x.transpose(1, 2) for x in (q, k, k)), causal=True)
        flash_attention(q, k, k, causal=True, seqused_k=torch.tensor([1, 2]))
        flash_attention(q[:, :2], k, k, causal=True)


def test_backends_that_cannot_run_name_no_argument_of_another_function() -> None:
    for function, arguments in CALLS.items():
        if function.__module__.startswith("warploom.ops"):
            doubles = [x.double() for x in arguments]
            if function in (tpa_attention, tpa_decode):
                a, b = torch.ones(1, 3, 2, 1).double(), torch.ones(1, 3, 1, 4).double()
                doubles = [a, a, a, b, b, b]
            with pytest.raises(warploom.BackendError, match=r"the tensors are float64|Triton is not installed"):
                function(*doubles, backend="triton")
