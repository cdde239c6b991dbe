"""Names of models and optimizers on the command line, parsed without importing anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempool.errors import UsageError
from mempool.torch.model_spec import (
    TYPES,
    ModelSpec,
    parse_name,
    parse_sizes,
    parse_target,
    parse_type,
)

_NAMES = st.from_regex(r"[a-z_]\w{0,8}", fullmatch=True).filter(lambda name: name.isascii())
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("abc'\"), (=", max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@given(
    _NAMES, st.dictionaries(_NAMES.filter(lambda n: n not in ("None", "True", "False")), _VALUES, max_size=3)
)
def test_name_with_arguments_round_trips_through_its_text(name: str, arguments: dict[str, object]) -> None:
    import keyword

    if not any(map(keyword.iskeyword, arguments)):
        named = ModelSpec("transformers", "", name, arguments)
        assert parse_target(str(named)) == named


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train.py", ModelSpec("script", "train.py", "")),
        ("a b/train.py", ModelSpec("script", "a b/train.py", "")),
        ("transformers:./a folder/config.json", ModelSpec("transformers", "", "./a folder/config.json")),
        ("transformers:meta-llama/Llama-2-7b-hf", ModelSpec("transformers", "", "meta-llama/Llama-2-7b-hf")),
    ],
)
def test_kind_of_a_model_name_follows_from_its_form(text: str, named: ModelSpec) -> None:
    assert parse_target(text) == named


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no model"),
        ("two words", "names no model"),
        ("train.py:Net", "fit a model of your own in Python: mempool.torch.fit(model, inputs)"),
        ("transformers:", "transformers: what?"),
        ("transformers:f(1)", "between the brackets stand key=value"),
        ("transformers:f(a=open('x'))", "between the brackets stand key=value"),
        ("transformers:f(**{})", "between the brackets stand key=value"),
        ("transformers:f(a=1", "neither a name nor"),
        ("transformers:f(a=" + "[" * 5000 + "]" * 5000 + ")", "between the brackets stand key=value"),
    ],
)
def test_invalid_name_gives_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_target(text)
    assert reason in str(error.value)


def test_optimizers_are_names_with_additions() -> None:
    assert parse_name("sgd+momentum") == ModelSpec("", "", "sgd+momentum")
    assert parse_name("adamw(lr=1e-3, foreach=False)").arguments == {"lr": 1e-3, "foreach": False}
    with pytest.raises(UsageError, match="neither a name nor"):
        parse_name("pkg.sub:make")


@given(st.lists(st.integers(1, 10**8), min_size=1))
def test_lists_of_sizes_keep_their_order_without_duplicates(sizes: list[int]) -> None:
    assert parse_sizes(",".join(map(str, sizes))) == list(dict.fromkeys(sizes))


@pytest.mark.parametrize("text", ["", "0", "-1", "1,", "1.5", "x", "1e3", "9" * 30])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="list of numbers"):
        parse_sizes(text)


def test_types_have_short_names_too() -> None:
    assert {parse_type(text) for text in ("bf16", "BFloat16", "torch.bfloat16")} == {"bfloat16"}
    assert set(TYPES.values()) <= set(TYPES)
    with pytest.raises(UsageError, match="no type 'fp8'"):
        parse_type("fp8")
