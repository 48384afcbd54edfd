"""Scripts of a shell are read as bash reads them, and never run."""

import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.shell.script import Unknown, find_dead, read_commands

SAME = [
    """run a 'b c' "d e" f\\ g a"b"c'd'\\ e""",
    """A=1; run $A ${A}2 "x$A" '$A'""",
    """A='1 2'; run $A "$A" """,
    """C=; run ${B:-3} ${C:-4} x${C-5}""",
    """A=(x 'y z' # comment
       w); A+=(v); run ${A[@]} "${A[@]}" "${A[*]}" $A""",
    """A=2; B=$((A * 3 + 1)); run $B $((B/2)) $(( (A+B) % 4 )) $((-7/2)) $((-7%3)) $((1+(2*3)))""",
    """A=x; A+=y; A=$A$A; run $A""",
    """run a \\
       b # c""",
    """run "$@" "" $*""",
    """A=" b c "; run a$A d a${A}d""",
    """A=("--fp8-format hybrid"); run ${A[@]} "${A[@]}" """,
    """B="--a --b"; run ${A:-$B} "${A:-a b}" """,
    """EXTRA="${E:---seq --bf}"; run $EXTRA""",
    """X=1 run b""",
    """A=1; { A=2; }; run $A""",
    """: <<EOF
A=5 don't
EOF
run ${A:-unset}""",
    """A="x
y"; run $A "$A" """,
    """A=("" b); run "${A[@]}" """,
    """if [ 1 = 2 ]; then run no; fi; run yes""",
    """f() { run inside; }
run outside""",
    """A=a; B=${A}_b; run $B ${B}c""",
    """run --x=$((8*2)) --y="a b" """,
    """for i in 1 2; do :; done; run done""",
    """run a > /dev/null 2>&1; run b""",
    """export A=1 B=2; run $A$B""",
    """A=7; run $((A > 3 ? A * 2 : 1)) $((A<3?1:A==7?2:3)) $((A >= 7 && A != 8)) $((A < 7 || !A)) $((!(A % 2)))""",
    """run $((2 ** 9)) $((2**3**2)) $((-2**2)) $((~5)) $((1 << 4 | 3)) $((6 & 3 ^ 1)) $((- -3)) $((5--3))""",
    """A=1; ((A = A * 8)); ((B = A + 2, C = B * 2)); run $A $B $C; ((A += 2)); ((B -= 1)); ((C *= 3)); run $A $B $C""",
    """A=9; ((A /= 2)); run $A; ((A %= 3)); ((A <<= 4)); ((A |= 1)); run $A; ((A++)); ((--A)); run $((A++)) $((++A))""",
    """Y=3; let X=Y*2; run $X; let "X += 1" 'Z = X * X'; run $X $Z; let A=5 B=A+1; run $A $B""",
    """N=4 G=8; W=$(( ${N} * ${G:-1} / $((2 * 2)) )); X=$(( W + ${M:-3} )); run $W $X $(( $N * "$G" ))""",
    """A=6 B=7; X=$(expr $A \\* $B); Y=`expr $A + $B`; run $X $Y $(expr \\( $A - $B \\) \\* 08) $(expr 7 / 2)""",
    """run $(expr 3 \\> 2) $(expr 3 = 4) $(expr -7 % 3)""",
    """A='1 + 2'; run $(( $A * 2 )) $((A * 2)); B=A; run $((B + 1)) $((0x10 + 010 + 2#101)) $[A * 4]""",
    """A=5; run $((A == 5 ? (B = 3) : 0)) $B; run $((0 && (A = 9))) $A; run $((1 || (A = 9))) $A""",
    """declare -i A=2*3; readonly -a B=(1 2); declare -x C=4; run $A ${B[@]} $C""",
    """for ((i = 0; i < 3; i++)); do :; done; A=4; if ((A > 3)); then :; fi; run $A""",
    """((A=1?2:3)); run $((A)) $(( A , A + 1 )) $((9223372036854775807 + 1)) $((-7 / 2)) $((-7 % 3))""",
    """M=moe; if [ "$M" = dense ]; then A=1; elif [ "$M" = moe ]; then A=2; else A=3; fi; run $A""",
    """N=16; if [ $N -gt 8 ] && [ $N -le 16 ]; then run a; run b; else run c; fi; run d""",
    """A=1; B=; [ -z "$B" ] && A=2; [ -n "$B" ] && A=3; [ "$B" ] || A=$A$A; run $A; [ -z $B ] && run empty""",
    """S=7b; case $S in 7b|8b) L=32; H=4096 ;; (70b) L=80 ;; *) L=1 ;; esac; run $L $H""",
    """S=x-13b; case "$S" in *"-7b") L=32 ;; *-13b) L=40 ;& esac
case q in [a-c]) run no ;; [^a-c]) run yes $L ;; esac""",
    """A=1; if [[ $A == 1 && ( "$A" != 2 || -z x ) ]]; then A=b*; fi; [[ $A == b\\* ]] && run same
[[ bcd == $A ]] && run glob""",
    """[[ "x y" == x* ]] && run a; [[ "*" == "*" ]] && run b; [[ ab == "a*" ]] || run c; [[ ! -z a ]] && run d""",
    """G=8; if (( G >= 8 )); then T=8; else T=1; fi; if ! (( G > 8 )); then P=1; fi; run $T $P""",
    """A=1; if false; then A=2; fi; if true && ! false; then B=3; fi; run $A $B
false || run c; true && run d; true || run e""",
    """A=0; { [ 1 = 2 ] && A=1; } || A=2; run $A; [ 1 = 2 ] && { A=3; run no; } || run yes $A""",
    """A=1; if [ 1 = 2 ]; then A=2; if [ 1 = 1 ]; then A=3; run no; fi; for i in 1; do A=4; done
case 1 in 1) A=5 ;; esac; fi; run $A""",
    """if [ 1 = 2 ]; then
  A=1   # a comment
  cat <<EOF
fi
EOF
  OPTS=(a
     b)
elif [ 2 = 2 ]; then OPTS=(c d)
else
  OPTS=(e)
fi > /dev/null
run "${OPTS[@]}" ${A:-none}""",
    """if [ a = a ]
then
    A=1
else
    A=2
fi
run $A
[ a = b ] ||
  run next""",
    """A=x; if [ "$A" = y -o \\( "$A" = x -a 3 -ge 3 \\) ]; then run a; fi
[ ! "$A" = x ] || run b; [ = = = ] && run c""",
    """[ a b ] || run q; [ x -eq 1 ] 2> /dev/null || run b; [ ] || run c; [ -n ] && run d; test 3 -lt 4 && run e""",
    """run a; if [ 1 -eq 1 ]; then run b; exit 0; fi; run c""",
    """f() { if [ "$Q" = 1 ]; then run no; fi; }
run yes""",
    """if [ 1 = 1 ]; then run a; fi && run b; if [ 1 = 2 ]; then :; fi && run c""",
    """if [ 1 = 2 ]; then A=(""" + "x" + """); fi; time run ${A:-z}""",
    """: ${A:=3} "${B=x y}"; run $A $B; C=; : ${C:=4} ${C:=5} ${A=6}; run $C $A""",
    """A=3
((
    A *= 2
))
run $((
    A + 1
))""",
]
TESTS = st.sampled_from([
    "[ $A = 1 ]", "[ $A != $B ]", '[ "$B" = "" ]', "[ $C -gt 2 ]", "[[ $C == 4* ]]", "[[ -n $B && $A -lt 9 ]]",
    "(( C > A ))", "true", "false", "[ -z $B ]", "! [ $C -eq 40 ]", "[[ $A = $C || ! -z $B ]]", "(( C += 1 ))",
    "test $A -le $C",
])  # fmt: skip
SETS = st.sampled_from(["A=1", "A=2", "B=", "B=x", "C=40", "C=3", "A=$C", "B=$A$B", "run $A $B $C; true", "((A++))"])


def nest(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Statements with conditions around others."""
    lists = st.lists(inner, min_size=1, max_size=3).map("; ".join)
    chains = st.lists(st.sampled_from(["&&", "||"]), min_size=1, max_size=3).flatmap(
        lambda signs: st.lists(st.one_of(TESTS, SETS), min_size=len(signs) + 1, max_size=len(signs) + 1).map(
            lambda parts: " ".join([parts[0], *(f"{sign} {part}" for sign, part in zip(signs, parts[1:], strict=True))])
        )
    )
    return st.one_of(
        chains,
        st.tuples(st.one_of(TESTS, chains), lists).map("if {0[0]}; then {0[1]}; fi".format),
        st.tuples(TESTS, lists, lists).map("if {0[0]}; then {0[1]}; else {0[2]}; fi".format),
        st.tuples(TESTS, lists, TESTS, lists, lists).map(
            "if {0[0]}\nthen\n {0[1]}\nelif {0[2]}; then {0[3]}\nelse {0[4]}; fi".format
        ),
        st.tuples(st.sampled_from(["$A", "$C", '"$B"']), lists, lists, lists).map(
            "case {0[0]} in\n 1|x) {0[1]} ;;\n 4*) {0[2]} ;;\n *) {0[3]} ;;\nesac".format
        ),
        st.tuples(TESTS, lists).map("{0[0]} && {{ {0[1]}; }}".format),
        st.tuples(TESTS, lists, inner).map("{0[0]} && {{ {0[1]}; }} || {0[2]}".format),
    )  # fmt: skip


NUMBERS = st.one_of(st.integers(0, 12), st.just(2**62), st.integers(-9, -1)).map(str) | st.sampled_from("ABC")


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.sampled_from(["+", "-", "*", "/", "%", "**", "<<", ">>", "<", ">", "<=", ">=", "==", "!=", "&", "^", "|",
                           "&&", "||", ","])  # fmt: skip
    assign = st.sampled_from(["=", "+=", "-=", "*=", "/=", "%=", "|=", "&=", "^=", "<<=", ">>="])
    return st.one_of(
        st.tuples(inner, two, inner).map(" ".join),
        st.tuples(inner, inner, inner).map("{0[0]} ? {0[1]} : {0[2]}".format),
        st.tuples(st.sampled_from("!~-+"), inner).map(" ".join), inner.map("({})".format),
        st.tuples(st.sampled_from("ABC"), assign, inner).map(" ".join),
        st.tuples(st.sampled_from("ABC"), st.sampled_from(["++", "--"])).map("".join),
        st.tuples(st.sampled_from(["++", "--"]), st.sampled_from("ABC")).map("".join),
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("text", SAME)
def test_words_are_those_that_bash_makes(text):
    show = """run() { for w in "$@"; do printf "[%s]" "$w"; done; printf "\\n"; }\n"""
    said = subprocess.run(["bash", "-c", show + text], capture_output=True, text=True, timeout=60, check=True).stdout
    own = [each.words[1:] for each in read_commands(text) if each.words[0] == "run" and not each.condition]
    own = [words for words in own if words != ("a",) or "/dev/null" not in text]  # which bash sends away
    assert "".join("".join(f"[{word}]" for word in words) + "\n" for words in own) == said


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.recursive(NUMBERS, grow, max_leaves=8), min_size=20, max_size=40))
def test_numbers_are_those_that_bash_computes(expressions):
    lines = [f'(echo "$(({text})) $A $B $C") 2> /dev/null || echo no' for text in expressions]
    said = subprocess.run(["bash"], input="\n".join(["A=3 B=-2 C=40", *lines]), capture_output=True, text=True,
                          timeout=60, check=False).stdout.splitlines()  # fmt: skip
    assert len(said) == len(expressions)
    for text, value in zip(expressions, said, strict=True):
        words = read_commands(f'A=3 B=-2 C=40\nrun "$(({text}))" $A $B $C')[-1].words[1:]
        if value == "no":
            assert isinstance(words[0], Unknown), (text, words)
        else:
            assert words == tuple(value.split()) and not isinstance(words[0], Unknown), (text, words, value)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.recursive(SETS, nest, max_leaves=10), min_size=10, max_size=20))
def test_branches_are_those_that_bash_takes(statements):
    show = """run() { for w in "$@"; do printf "[%s]" "$w"; done; printf "\\n"; }\nA=1 B=x C=40\n"""
    text = "\n".join([*statements, "run $A $B $C"])
    said = subprocess.run(["bash"], input=show + text, capture_output=True, text=True, timeout=60, check=False).stdout
    own = read_commands(f"A=1 B=x C=40\n{text}")
    assert not any(each.condition or isinstance(word, Unknown) for each in own for word in each.words), text
    words = [each.words[1:] for each in own if each.words[0] == "run"]
    assert "".join("".join(f"[{word}]" for word in each) + "\n" for each in words) == said, text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run $A", "set by no line of the script"),
        ("if [ 1 = 2 ]; then A=(1); fi\nrun $A", "set by no line that is run"),
        ("run $2", "argument 2 of the script"),
        ("A=$(hostname)\nrun $A", "the output of a command, on line 1"),
        ("A=`hostname`\nrun $A", "the output of a command, on line 1"),
        (
            "if [ $B ]; then\n A=1\nelse\n A=2\nfi\nrun $A",
            "set inside of the `if` of line 1, which $B decides",
        ),
        ("A=0; if [ -f x ]; then A=1; fi\nrun $A", "set inside of the `if` of line 1"),
        ("A=0; if cmd; then A=1; fi\nrun $A", "set inside of the `if` of line 1"),
        ("A=0; if B=$(cmd); then A=1; fi\nrun $A", "set inside of the `if` of line 1"),
        ('A=0; if B="$(cmd)"; then A=1; fi\nrun $A', "set inside of the `if` of line 1"),
        (
            "A=0; B=1\nif [ $B = 2 ]; then A=1; elif [ $C ]; then A=2; else A=3; fi\nrun $A",
            "set inside of the `if` of line 2, which $C decides",
        ),
        (
            "if [ $B ]; then\n if [ 1 = 1 ]; then A=1; fi\nfi\nrun $A",
            "set inside of the `if` of line 1, which $B decides",
        ),
        ("case $B in x) A=1 ;; *) A=2 ;; esac\nrun $A", "set inside of the `case` of line 1, which $B decides"),
        ("case x in +(x)) A=1 ;; *) A=2 ;; esac\nrun $A", "set inside of the `case` of line 1"),
        ("case x in x) A=1 ;& y) A=2 ;; esac\nrun $A", "set inside of the `case` of line 1"),
        ("A=1; for i in 1 2; do B=$i; if [ 1 = 1 ]; then A=2; fi; done\nrun $A", "set inside of the `for` of line 1"),
        ("A=1; [ $B ] && { C=2; A=2; }\nrun $A", "set behind `&&` on line 1, which $B decides"),
        ("A=1; B=x; if [[ $B =~ ^x ]]; then A=2; fi\nrun $A", "set inside of the `if` of line 1"),
        ("A=0\nfor i in 1 2; do A=$i; done\nrun $A", "set inside of the `for` of line 2"),
        (
            "A=0\nwhile true; do case $1 in --a) A=$2; shift ;; esac; done\nrun $A",
            "set inside of the `while` of line 2",
        ),
        ("A=0\nfor i in 1; do while :; do :; done; A=2; done\nrun $A", "set inside of the `for` of line 2"),
        ('A=4\n[ -z "$B" ] && A=1\nrun $A', "set behind `&&` on line 2, which $B decides"),
        ('A=4\n[ -n "$B" ] || A=1\nrun $A', "set behind `||` on line 2, which $B decides"),
        ("A=4\ntest -d x || A=1\nrun $A", "set behind `||` on line 2"),
        ("A=1\nf() {\n A=8\n}\nrun $A", "set inside of the function f of line 2"),
        ("A=1\nfunction f {\n A=8\n}\nrun $A", "set inside of the function f of line 2"),
        ("A=1\n(A=2)\nrun $A", "set inside of the parentheses of line 2"),
        ("A=1\nunset A\nrun $A", "set by `unset` on line 2"),
        ("A=1\nread A\nrun $A", "set by `read` on line 2"),
        ("A=1\n((A = 2, B[0] = 8))\nrun $A", "set by arithmetic on line 2"),
        ("A=1\n((A = B * 8))\nrun $A", "set by no line of the script"),
        ("A=1\n((A = $1 * 8))\nrun $A", "argument 1 of the script"),
        ("A=1\nlet A=N+1\nrun $A", "set by no line of the script"),
        ("A=1\nif cmd; then ((A += 1)); fi\nrun $A", "set inside of the `if` of line 2"),
        ("A=1\n[ $B ] && ((A++))\nrun $A", "set behind `&&` on line 2, which $B decides"),
        ("A=5\nfor ((A = 0; A < 3; A++)); do :; done\nrun $A", "set inside of the `for` of line 2"),
        ("A=$(expr length abc)\nrun $A", "the output of a command, on line 1"),
        ("A=$(expr $N + 1)\nrun $A", "set by no line of the script"),
        ("A=$((N > 8 ? 2 : 4))\nrun $A", "set by no line of the script"),
        ("A=B\nB=A\nrun $((A))", "arithmetic that is not read here, on line 3"),
        (
            "A=B+B+B B=C+C+C C=D+D+D D=E+E+E E=F+F+F F=G+G+G G=A+A\nrun $((A))",
            "arithmetic that is not read here, on line 2",
        ),
        (f"run $(({'(' * 5000}1{')' * 5000}))", "arithmetic that is not read here, on line 1"),
        ("A=(1 2)\nA[0]=5\nrun $A", "an item set on line 2"),
        ("A=${B%x}\nrun $A", "nothing that is read here, on line 1"),
        ("A=$(( $N * 2 ))\nrun $A", "set by no line of the script"),
        ("A=$((2 ** -1))\nrun $A", "arithmetic that is not read here, on line 1"),
        ("A=$((08 + 1))\nrun $A", "arithmetic that is not read here, on line 1"),
        ("A=$((1 2))\nrun $A", "arithmetic that is not read here, on line 1"),
        ("A=$((1 / 0))\nrun $A", "arithmetic that is not read here, on line 1"),
        ("A=${B:?say B}\nrun $A", "set by no line of the script"),
    ],
)
def test_what_the_script_alone_does_not_say_is_unknown(text, reason):
    (_, word) = read_commands(text)[-1].words
    assert isinstance(word, Unknown) and word.reason == reason


def test_values_that_are_given_come_first():
    given = {"A": "5", "B": "6", "@": "x y"}
    assert read_commands('A=1\nrun $A $((A+1)) ${B:-2} "$@"', given)[-1].words == ("run", "5", "6", "6", "x", "y")
    assert read_commands("if [ 1 ]; then A=1; fi\nrun $A", {"A": "7"})[-1].words == ("run", "7")


def test_arguments_that_are_given_decide_too():
    text = 'if [ $# -ge 2 ] && [ "$2" = big ]; then A=8; else A=1; fi\nrun $A $1'
    assert read_commands(text, {"@": "x big"})[-1].words == ("run", "8", "x")
    assert read_commands(text, {"@": "x"})[-1].words == ("run", "1", "x")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_is_not_run_is_found_in_the_text(end):
    lines = ["if [ 1 = 2 ]; then", "  A=1 # one", "  B=2", "else", "  A=3", "fi", "[ 1 = 1 ] || C=4", "run $A"]
    text = end.join(lines)
    dead = [text[begin:stop] for begin, stop in find_dead(text)]
    assert [each[:3] for each in dead if "=" in each] == ["A=1", "B=2", "C=4"] and not any(
        "A=3" in each for each in dead
    )
    assert read_commands(text)[-1].words == ("run", "3")


def test_a_command_says_where_it_lies_and_whether_it_passes_arguments():
    inside, outside = read_commands('if cmd; then run "$@"; fi\nrun b')[-2:]
    assert (inside.condition, inside.passes_arguments, inside.line) == ("the `if` of line 1", True, 1)
    assert (outside.condition, outside.passes_arguments, outside.line) == ("", False, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run 'a", "line 1: a quote is not closed"),
        ('A=1\nrun "a', "line 2: a quote is not closed"),
        ("A=(1\n", "line 1: an array has no closing parenthesis"),
        ("if true\nrun a", "the `if` of line 1 has no `fi`"),
        ("run a; fi", "line 1: `fi` closes nothing"),
        ("case a\nrun", "line 1: `case` has no `in`"),
        ("case a in b run", r"line 1: a pattern of `case` has no `\)`"),
        ("case a in ) run", r"line 1: '\)' stands where a word is read"),
        ("[[ a = b", "line 1: `\\[\\[` has no"),
        ("then run", "line 1: `then` belongs to nothing"),
        ("while a; then", "line 1: `then` belongs to nothing"),
        ("run $((1", r"line 1: \( is not closed"),
        ("run ${A", r"line 1: \{ is not closed"),
        ("run $(a", r"line 1: \( is not closed"),
    ],
)
def test_what_is_no_script_is_refused_by_its_line(text, problem):
    with pytest.raises(InvalidConfig, match=problem):
        read_commands(text)


def test_nothing_of_a_script_is_run(tmp_path):
    mark = tmp_path / "mark"
    read_commands(f"touch {mark}\nA=$(touch {mark})\nB=`touch {mark}`\nC=$((__import__('os').system('touch {mark}')))")
    assert not mark.exists()
