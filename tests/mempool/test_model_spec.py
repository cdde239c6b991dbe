"""Model names on the command line, parsed without importing their modules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempool.errors import UsageError
from mempool.torch.model_spec import (
    TYPES,
    InputSpec,
    ModelSpec,
    parse_inputs,
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
    st.sampled_from(["transformers", "module", "script"]), _NAMES, _NAMES,
    st.dictionaries(_NAMES.filter(lambda n: n not in ("None", "True", "False")), _VALUES, max_size=3),
)  # fmt: skip
def test_name_with_arguments_round_trips_through_its_text(
    kind: str, where: str, name: str, arguments: dict[str, object]
) -> None:
    import keyword

    if any(map(keyword.iskeyword, (where, *arguments))) or where == "transformers":
        return
    place = {"transformers": "", "module": f"pkg.{where}", "script": f"dir/{where}.py"}[kind]
    named = ModelSpec(kind, place, name, arguments)
    assert parse_target(str(named)) == named


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train.py", ModelSpec("script", "train.py", "")),
        ("a b/train.py:Net", ModelSpec("script", "a b/train.py", "Net")),
        ("pkg.sub", ModelSpec("module", "pkg.sub", "")),
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
        ("pkg:", "ends at the colon"),
        ("transformers:", "transformers: what?"),
        ("pkg:f(1)", "between the brackets stand key=value"),
        ("pkg:f(a=open('x'))", "between the brackets stand key=value"),
        ("pkg:f(**{})", "between the brackets stand key=value"),
        ("pkg:f(a=1", "neither a name nor"),
        ("pkg:f(a=" + "[" * 5000 + "]" * 5000 + ")", "between the brackets stand key=value"),
    ],
)
def test_invalid_name_gives_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_target(text)
    assert reason in str(error.value)


def test_optimizers_are_names_with_additions_or_functions() -> None:
    assert parse_name("sgd+momentum") == ModelSpec("", "", "sgd+momentum")
    assert parse_name("adamw(lr=1e-3, foreach=False)").arguments == {"lr": 1e-3, "foreach": False}
    assert parse_name("pkg.sub:make") == ModelSpec("module", "pkg.sub", "make")
    assert parse_name("own.py:make") == ModelSpec("script", "own.py", "make")


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 9))
def test_input_sizes_are_products_of_batch_and_sequence_length(batch: int, seq: int, factor: int) -> None:
    [image, mask] = parse_inputs(f"float32[{factor}*B, 3,S] mask=bool[B,S*{factor}*B];")
    assert (image.name, image.type, mask.name, mask.type) == ("", "float32", "mask", "bool")
    assert image.sizes(batch, seq) == (factor * batch, 3, seq)
    assert mask.sizes(batch, seq) == (batch, seq * factor * batch)


def test_input_without_a_type_is_float32_and_without_sizes_a_number() -> None:
    assert parse_inputs("[B] long[]") == (InputSpec("", "float32", (("B",),)), InputSpec("", "int64", ()))


@pytest.mark.parametrize(
    "text",
    ["", "float32", "float33[B]", "float32[B,x]", "float32[B,-1]", "f32[B", "1a=f32[B]", "[99999999999999]"],
)
def test_invalid_inputs_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_inputs(text)


def test_inputs_with_an_unknown_sequence_length_ask_for_the_option() -> None:
    with pytest.raises(UsageError, match="--seq"):
        parse_inputs("[B,S]")[0].sizes(1, None)


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
