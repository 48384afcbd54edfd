"""Scripts of a shell are read and never run."""

import pytest

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.shell import Unknown, read_commands


def words(text: str, **given: str) -> list[str]:
    """Words of the last command."""
    return list(read_commands(text, given)[-1].words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run a 'b c' \"d e\" f\\ g", ["run", "a", "b c", "d e", "f g"]),
        ("A=1\nrun $A ${A}2 \"x$A\" '$A'", ["run", "1", "12", "x1", "$A"]),
        ("A='1 2'\nrun $A \"$A\"", ["run", "1", "2", "1 2"]),
        ("A=${B:-3} C=\nrun $A ${C:-4} ${C-5}", ["run", "3", "4"]),
        ("A=(x 'y z' # comment\n  w)\nA+=(v)\nrun ${A[@]} \"${A[@]}\"", ["run", *["x", "y z", "w", "v"] * 2]),
        ("A=2; B=$((A * 3 + 1))\nrun $B $((B/2)) $(( (A+B) % 4 ))", ["run", "7", "3", "1"]),
        ("export A=1 B=2\nrun $A$B", ["run", "12"]),
        ("A=x\nA+=y\nrun $A", ["run", "xy"]),
        ("run a \\\n  b # c\n", ["run", "a", "b"]),
        ("run a > log 2>&1", ["run", "a"]),
        ("run \"$@\" $* \"\"", ["run", ""]),
        ("X=1 run b", ["run", "b"]),
        ("set -e\nrun a && true", ["true"]),
        ("run a#b", ["run", "a#b"]),
        ("run `date`", ["run", "`date`"]),
        ("run \"a\\\"b\" $", ["run", 'a"b', "$"]),
    ],
)  # fmt: skip
def test_words_are_those_that_a_shell_makes(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run $A", "set by no line of the script"),
        ("run $2", "argument 2 of the script"),
        ("A=$(hostname)\nrun $A", "the output of a command, on line 1"),
        ("if [ 1 ]; then\n A=1\nelse\n A=2\nfi\nrun $A", "set inside of the `if` of line 1"),
        ("A=0\nfor i in 1 2; do\n A=$i\ndone\nrun $A", "set inside of the `for` of line 2"),
        ("A=${B%x}\nrun $A", "nothing that is read here, on line 1"),
        ("A=$(( $N * 2 ))\nrun $A", "set by no line of the script"),
        ("A=${B:?say B}\nrun $A", "set by no line of the script"),
    ],
)  # fmt: skip
def test_what_the_script_alone_does_not_say_is_unknown(text, reason):
    (_, word) = words(text)
    assert isinstance(word, Unknown) and word.reason == reason


def test_values_that_are_given_come_first():
    assert words("A=1\nrun $A $((A+1)) ${B:-2}", A="5", B="6") == ["run", "5", "6", "6"]
    assert words("if [ 1 ]; then A=1; fi\nrun $A", A="7") == ["run", "7"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run 'a", "line 1: a quote is not closed"),
        ('A=1\nrun "a', "line 2: a quote is not closed"),
        ("A=(1\n", "line 1: an array has no closing parenthesis"),
        ("if true\nrun a", "line 1: `if` has no `fi`"),
        ("main() {\nrun a\n}", "line 1: functions of a shell are not read"),
        ("run $((1", "line 1: \\$\\(\\( is not closed"),
        ("run ${A", "line 1: \\$\\{ is not closed"),
        ("run $(a", "line 1: \\$\\( is not closed"),
        ("A=$((1 / 0))\nrun", "is no arithmetic of whole numbers"),
        ("A=$((2 ** 99))\nrun", "is no arithmetic of whole numbers"),
    ],
)
def test_what_is_no_such_script_is_refused_by_its_line(text, problem):
    with pytest.raises(InvalidConfig, match=problem):
        read_commands(text)


def test_nothing_of_a_script_is_run(tmp_path):
    mark = tmp_path / "mark"
    read_commands(f"touch {mark}\nA=$(touch {mark})\nB=`touch {mark}`\nC=$((__import__('os').system('touch {mark}')))")
    assert not mark.exists()
