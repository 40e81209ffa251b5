"""Documents: plain data under limits, whatever the syntax; everything else is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from topologies.documents import limits, syntaxes
from topologies.documents.errors import LONGEST
from topologies.documents.syntaxes import MalformedError, dump_yaml, parse, parse_json, parse_toml, parse_yaml
from topologies.reading import UserError, load_text, load_yaml, parse_value, shown

ROOT = Path(__file__).parents[2]
BILLIONS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)  # 9⁹ texts in 500 bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# a comment", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("12", 12),
        ("-3", -3),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("1e9", 1e9),
        ("5e-1", 0.5),
        (".5", 0.5),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2001-13-45", "2001-13-45"),
        ("2026-08-19", "2026-08-19"),
        ("=", "="),
        ("'1'", "1"),
        ('"\\u00e9"', "é"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
        ("1: a\ntrue: b\nnull: c", {"1": "a", "true": "b", "null": "c"}),
        ("a: &x {tp: 2}\nb: *x", {"a": {"tp": 2}, "b": {"tp": 2}}),
        ("a: {<<: {tp: 2, pp: 3}, pp: 4}", {"a": {"tp": 2, "pp": 4}}),
        ("{<<: [{tp: 1}, {tp: 2, pp: 2}]}", {"tp": 1, "pp": 2}),  # the first that has it
        ("\ufeffa: 1", {"a": 1}),
    ],
)
def test_yaml_means_what_the_core_schema_of_yaml_1_2_says(text: str, value: object) -> None:
    parsed = parse_yaml(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("a: !!python/object/apply:os.system [id]", 1, "the tag '!!python/object/apply:os.system' is not read"),
        ("a: 1\nb: !!int x", 2, "the tag '!!int'"),
        ("!!set {a}", 1, "the tag '!!set'"),
        ("a: !x y", 1, "the tag '!x'"),
        ("a: ! y", 1, "the tag '!'"),
        ("!!timestamp x", 1, "the tag '!!timestamp'"),
        ("? [a, b]\n: c", 1, "a list as a key"),
        ("{{a: b}: c}", 1, "a mapping as a key"),
        ("a: &a b\n*a : c", 2, "an alias as a key"),
        ("a: 1\nb: 2\na: 3", 3, "field 'a' is given twice"),
        ("a: 1\n--- \nb: 2", 2, "a second document"),
        ("a: &a [*a]", 1, "*a contains itself"),
        ("a: *b", 1, "*b is not defined"),
        ("<<: 3", 1, "<< takes a mapping"),
        (".inf", 1, ".inf is no number of JSON"),
        ("a: .nan", 1, ".nan is no number of JSON"),
        ("1e999", 1, "1e999 is too large"),
        ("9" * 5000, 1, "a number of more than 64 digits"),
        ('"\\0"', 1, "the control character '\\x00'"),
        ('a: "\\e[31m"', 1, "the control character '\\x1b'"),
        ('"\\ud800": 1', 1, ""),
        ("a: " + "x" * 20_001, 1, "a text of more than 20,000 letters"),
        ("x" * 201 + ": 1", 1, "a key of more than 200 letters"),
        ("[" * 1_000_000, 1, "more than 64 mappings and lists inside each other"),
        ("{a: " * 100_000, 1, "more than 64"),
        ("- " * 100_000, 1, "more than 64"),
        (BILLIONS, 6, "more than 500,000 values, those behind aliases counted"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_yaml_that_is_refused(text: str, line: int, rule: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_yaml(text)
    assert caught.value.line == line
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["\ud800", "a\0b", "\x1b[31m"])
def test_letters_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"a": 1, "a": 2}', "field 'a' is given twice"),
        ("[NaN]", "NaN is no number of JSON"),
        ("[-Infinity]", "-Infinity is no number"),
        ("1e999", "too large"),
        ("9" * 5000, "more than 64 digits"),
        ('"\\u0000"', "the control character '\\x00'"),
        ('{"\\u001b": 1}', "the control character '\\x1b'"),
        ('"\\ud800"', "the control character '\\ud800'"),
        ("[" * 1_000_000, "more than 64"),
        ("[" * 65 + "]" * 65, "more than 64"),
        ("[1, 2", "Expecting ',' delimiter"),
    ],
    ids=lambda value: value[:24],
)
def test_json_that_is_refused(text: str, rule: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_json(text)
    assert rule in str(caught.value)


def test_values_are_counted_in_every_syntax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VALUES", 100)
    for parser, text in (
        (parse_yaml, "[" + "1, " * 100 + "1]"),
        (parse_json, "[" + "1, " * 100 + "1]"),
        (parse_toml, "a = [" + "1, " * 100 + "1]"),
    ):
        with pytest.raises(MalformedError, match="more than 100 values"):
            parser(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a = 2001-01-01", "2001-01-01 is a date"),
        ("a = 07:32:00", "07:32:00 is a date"),
        ("a = inf", "inf is no number"),
        ("a = " + "9" * 5000, "more than 64 digits"),
        ("a = " + "9" * 65, "more than 64 digits"),
        ('a = "\\u0000"', "the control character '\\x00'"),
        ("a = " + "[" * 100_000, "more than 64"),
        ("a" + ".a" * 100_000 + " = 1", "more than 64"),
        ("a = 1\na = 2", "Cannot overwrite a value"),
    ],
    ids=lambda value: value[:24],
)
def test_toml_that_is_refused(text: str, rule: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_toml(text)
    assert rule in str(caught.value)


def test_the_end_of_a_files_name_says_its_syntax() -> None:
    assert parse('{"a": "\\ud83e\\udd84", "b": 1e-06}', ".json") == {"a": "🦄", "b": 1e-6}
    assert parse("a: 1", ".json") == {"a": 1}  # YAML under JSON's name
    assert parse("[a]\nb = 1", ".toml") == {"a": {"b": 1}}
    assert parse("[a]\n", ".yaml") == ["a"]


@pytest.mark.parametrize(
    "value", ["1e5", "12e-3", "017", "0o17", "no", "null", "2001-01-01", "1_0", "", ".5", "🦄", 1e-7, 3, None, True]
)
def test_what_is_written_is_read_back(value: object) -> None:
    data = {"a": [value], str(value): value}
    assert parse_yaml(dump_yaml(data)) == data
    assert yaml.safe_load(dump_yaml(data)) == data  # and by other programs


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("examples/**/*.yaml")) + sorted(ROOT.glob("strategies/models/presets/*")), ids=lambda p: p.name
)
def test_shipped_files_mean_what_they_meant(path: Path) -> None:
    assert load_yaml(path) == yaml.safe_load(path.read_text(encoding="utf-8"))


def test_errors_name_file_line_and_rule_on_one_line(tmp_path: Path) -> None:
    (file := tmp_path / "job.yaml").write_text("model: gpt2\nplan: !!python/name:os.system\n")
    with pytest.raises(UserError) as caught:
        load_yaml(file)
    rule = "the tag '!!python/name:os.system' is not read: a value is what it looks like"
    assert str(caught.value) == f"{file}: not valid YAML at line 2: {rule}"
    with pytest.raises(UserError) as caught:
        parse_value("? [a, b]\n: c", "--set plan.tp=? [a, b]\n: c")
    assert str(caught.value) == "--set plan.tp=? [a, b]\\n: c: the value is not valid YAML: a list as a key; keys are texts"


def test_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    (file := tmp_path / "big").write_bytes(b"x" * 33)
    assert load_text(file, most=33) == "x" * 33
    with pytest.raises(MalformedError, match="larger than"):
        syntaxes.read_text(file, most=32)
    file.write_bytes(b"\xff\xfe\0")
    with pytest.raises(UserError, match="cannot be read: not UTF-8 text"):
        load_text(file)
    for name in ("a\0b", "a" * 300, "nowhere"):
        with pytest.raises(UserError, match="cannot be read"):
            load_text(tmp_path / name)


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem"])
def test_files_without_end_are_not_read_to_it(path: str) -> None:
    if Path(path).exists():
        with pytest.raises(UserError, match="cannot be read"):
            load_text(Path(path))


def test_an_error_is_one_printable_line_of_some_length() -> None:
    text = str(UserError(f"a\nb\x1b[31m\u2028{'9' * 5000}"))
    assert text.startswith("a\\nb\\x1b[31m\\u20289999")
    assert text.isprintable()
    assert len(text) < LONGEST + 4
    assert shown("x" * 500) == f"'{'x' * 53} … {'x' * 25}'"
    assert shown(10**5000) == "a number of thousands of digits"
