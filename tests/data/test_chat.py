"""Conversations: the template's text, only answers are targets, whoever says where they are."""

import gc
import json
import subprocess
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from thorough import mostly_thorough
from waiting import wait_until

from dtlayout.base.errors import DataError
from dtlayout.base.interpreter import run_code
from dtlayout.base.process import is_gone
from dtlayout.config.sections import DataConfig
from dtlayout.data.chat import ChatTemplate, TemplateLimits, load_template
from dtlayout.data.extent import describe_sources
from dtlayout.data.prepare import prepare_tokens
from dtlayout.data.samples import SampledSource
from dtlayout.data.template import scale_limit
from dtlayout.data.tokens import TokenFile

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "A:{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}U:{{ message['content'] }}\n{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if loop.last and message['role'] == 'assistant' %}thought {% endif %}{{ message['content'] }}\n{% endfor %}"
)
CONVERSATION = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello <b>"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "ja ß"},
]


def cut(text, spans, *_):
    return [text[first:end] for first, end in spans]


def test_answers_are_what_the_template_adds_to_the_prompt_for_them():
    text, spans, is_answered, num_rewritten = ChatTemplate(CHATML, {}).find_answers(CONVERSATION)
    assert (is_answered, num_rewritten) == (True, 0)
    assert text.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello <b><|im_end|>\n")
    assert cut(text, spans) == ["hello <b><|im_end|>\n", "ja ß<|im_end|>\n"]
    assert ChatTemplate(CHATML, {}).find_answers(CONVERSATION[:1])[1:] == ([], False, 0)


def test_a_template_that_marks_answers_is_believed():
    template = ChatTemplate(MARKED, {"bos_token": "<s>", "eos_token": "</s>"})
    text, spans, *_ = template.find_answers(CONVERSATION)
    assert text == "<s>U:hi\nA:hello <b></s>U:é?\nA:ja ß</s>"
    assert cut(text, spans) == ["hello <b></s>", "ja ß</s>"]
    assert template.render(CONVERSATION[:1]) == "<s>U:hi\n"


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL])
@pytest.mark.parametrize("num_messages", [2, 3, 4])
def test_of_the_last_answer_alone_nothing_else_is_learnt(template, num_messages):
    chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    messages = CONVERSATION[:num_messages]
    (last,) = cut(*chat.find_answers(messages, only_last=True))
    assert ("hello <b>" if num_messages < 4 else "ja ß") in last
    assert chat.find_answers(CONVERSATION[:1], only_last=True).spans == []


def test_answers_that_change_once_messages_follow_are_not_learnt_but_the_last_is_and_how_many_is_said(
    tmp_path, offline
):
    template = ChatTemplate(FORGETFUL, {})
    assert cut(*template.find_answers(CONVERSATION[:2])) == ["assistant:thought hello <b>\n"]
    found = template.find_answers(CONVERSATION)
    assert cut(*found) == ["assistant:thought ja ß\n"]
    assert (found.text.split("\n")[1], found.is_answered, found.num_rewritten) == ("assistant:hello <b>", True, 1)
    unanswered = template.find_answers(CONVERSATION[:3])  # the question behind would change the answer too
    assert unanswered == template.find_answers(CONVERSATION[:2])
    tokens = prepare(tmp_path, FORGETFUL, [CONVERSATION, CONVERSATION[:3], CONVERSATION])
    assert tokens.num_rewritten == 2
    source = SampledSource(tokens, 16, "chats")
    assert describe_sources([source])[-1] == (
        "note: 2 answers of chats not learnt: the chat template writes them in another way once messages follow; the "
        "last answer of each conversation is learnt"
    )
    assert prepare(tmp_path, FORGETFUL, [CONVERSATION], loss_on="last").num_rewritten == 0
    assert prepare(tmp_path, FORGETFUL, [CONVERSATION], loss_on="all").loss_mask is None


def test_an_answer_that_does_not_follow_its_prompt_is_refused():
    template = ChatTemplate(
        "{% if add_generation_prompt %}ask{% endif %}{% for m in messages %}{{ m }}{% endfor %}", {}
    )
    said = r"does not write message 4 as what its prompt for an answer.*\{% generation %\}, or use data\.loss_on"
    with pytest.raises(DataError, match=said):
        template.find_answers(CONVERSATION)


def test_answers_of_one_turn_that_stand_as_they_were_written_are_all_learnt():
    """A template that drops the thoughts of earlier turns, in a conversation whose last turn calls a tool."""
    template = (
        "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}[{{ m.role }}]"
        "{% if m.role == 'assistant' and loop.index0 > n.last"
        " %}({{ m.thought }}){% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "call"), ("tool", "7"), ("assistant", "d")]
    messages = [{"role": role, "content": content, "thought": f"t{i}"} for i, (role, content) in enumerate(said)]
    found = ChatTemplate(template, {}).find_answers(messages)
    assert (cut(*found), found.num_rewritten) == (["(t3)call", "(t5)d"], 1)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "the chat template is not Jinja: "),
        ("{{ raise_exception('roles must alternate') }}", "this conversation: TemplateError roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot write this conversation: TypeError"),
        ("{{ messages.append(1) }}", "cannot write this conversation: SecurityError"),
        ("{{ 1 / 0 }}", "cannot write this conversation: ZeroDivisionError"),
        ("{{ bos_token }}", "cannot write this conversation: UndefinedError the tokenizer names no bos_token"),
    ],
)
def test_a_template_that_fails_says_why(template, said):
    with pytest.raises(DataError, match=said):
        ChatTemplate(template, {}).find_answers(CONVERSATION)


FLOODS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long loop": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "a string doubled in a loop": "{% set n = namespace(x='xxxxxxxx') %}"
    "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a list doubled in a loop": "{% set n = namespace(x=[1]) %}"
    "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a product that is folded": "{{ 'a' * 10 ** 11 }}",
    "a product of messages": "{{ messages * 10 ** 11 }}",
    "a power in C, which hears of no signal": "{{ 10 ** (10 ** 9) }}",
    "a filter": "{{ 'a' | center(10 ** 11) }}",
    "a filter that fills": "{{ [1] | batch(10 ** 11, 2) | list }}",
    "a method": "{{ 'a'.ljust(10 ** 11) }}",
    "a format": "{{ '%1000000000000d' % 1 }}",
    "a format method": "{{ '{:1000000000000d}'.format(1) }}",
    "JSON that is indented": "{{ messages | tojson(indent=10 ** 11) }}",
    "words that mean nothing": "{{ lipsum(n=10 ** 8) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "a text that is too long": "{{ 'a' * 2 ** 24 }}{{ 'a' }}",
    "words of its own that are too many": "{{ raise_exception('a' * 2 ** 26) }}",
    "brackets in brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a loop in what is compiled": "{{ " + "[" * 90 + "1" + "]" * 90 + " }}{{ 'ab' * 10 ** 12 }}",
}


OF_A_KIND = (
    "a string doubled in a loop",
    "a product of messages",
    "a filter",
    "a method",
    "a format",
    "words that mean nothing",
)
"""Templates whose like is among the others."""


@pytest.mark.parametrize("name", mostly_thorough(FLOODS, lambda _, name: name not in OF_A_KIND))
def test_a_template_that_takes_too_much_is_refused_and_leaves_no_process(name):
    template, started = (
        ChatTemplate(FLOODS[name], {}, TemplateLimits(cpu_s=0, memory_bytes=1 << 28)),
        time.process_time(),
    )
    with pytest.raises(DataError, match=r"^the chat template (cannot write this conversation|is not Jinja): ") as error:
        template.find_answers(CONVERSATION)
    assert len(str(error.value)) < 2100 and "\n" not in str(error.value) and "Traceback" not in str(error.value)
    assert time.process_time() - started < 2, "it ran in this process"
    process = template._process
    del template, error
    gc.collect()
    assert process is None or process.poll() is not None


def test_a_template_may_take_its_time_for_each_conversation_again_and_goes_on_after_one_that_took_too_much():
    loop = "{% for i in range(messages[0].n) %}{% for j in range(30000) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(loop + "done", {}, TemplateLimits(cpu_s=1))
    assert [template.render([{"role": "user", "n": 150}]) for _ in range(15)] == ["done"] * 15  # some .2 s each
    with pytest.raises(DataError, match=r"this conversation: it takes more than 1 s$"):
        template.render([{"role": "user", "n": 90000}])
    assert template.render([{"role": "user", "n": 1}]) == "done"


def test_a_template_of_a_run_that_was_killed_ends_with_it(tmp_path):
    code = (
        "import os; from dtlayout.data.chat import ChatTemplate; t = ChatTemplate('x', {}); t.check(); "
        "print(t._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    pid = int(subprocess.run(run_code(code), stdout=subprocess.PIPE, timeout=60, check=False).stdout)
    wait_until(lambda: is_gone(pid))


def test_what_a_template_process_answers_is_not_believed(monkeypatch):
    for answer in ("no JSON", "[1]", '{"text": 1', "", "x" * (1 << 26)):
        code = f"print({answer[:20]!r} + 'x' * {max(0, len(answer) - 20)}, flush=True); input()"
        monkeypatch.setattr("dtlayout.data.chat.run_module", lambda *_, code=code: run_code(code))
        with pytest.raises(DataError, match=r"this conversation: its process ended with exit code -?\d+$"):
            ChatTemplate("x", {}, TemplateLimits(characters=1 << 20)).render([])


def test_templates_are_found_where_tokenizers_have_them(tmp_path, write_tokenizer):
    path = write_tokenizer()
    with pytest.raises(DataError, match=r"tokenizer '.*' has no chat template; name a Jinja file with data\.chat_temp"):
        load_template("", str(tmp_path))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": MARKED}]
    for found in (MARKED, several):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": found}))
        assert load_template("", str(path)).render(CONVERSATION[:2]) == "<s>U:hi\nA:hello <b></s>"
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert load_template("", str(tmp_path)).render([]) == "beside"
    (tmp_path / "own.jinja").write_text("own {{ bos_token }}")
    assert load_template(str(tmp_path / "own.jinja"), str(tmp_path)).render([]) == "own <s>"
    assert load_template(str(tmp_path / "chat_template.jinja"), "bytes").render([]) == "beside"
    with pytest.raises(DataError, match=r"the chat template '.*missing\.jinja' cannot be read"):
        load_template(str(tmp_path / "missing.jinja"), "bytes")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json' is not JSON"):
        load_template("", str(tmp_path))


def prepare(folder, template, conversations, tokenizer="bytes", **options):
    (folder / "template.jinja").write_text(template)
    lines = [json.dumps({"messages": conversation}) + "\n" for conversation in conversations]
    (folder / "chats.jsonl").write_text("".join(lines))
    data = DataConfig(
        source=str(folder / "chats.jsonl"), messages_field="messages", chat_template=str(folder / "template.jinja"),
        tokenizer=tokenizer, folder=str(folder / "tokens"), **options,
    )  # fmt: skip
    return TokenFile.open(prepare_tokens(data))


def test_of_bytes_only_answers_and_the_end_after_the_last_are_taught(tmp_path, offline):
    tokens = prepare(tmp_path, CHATML, [CONVERSATION, CONVERSATION[:3]])
    first, second = (slice(*tokens.documents[i : i + 2]) for i in range(2))
    trained_on = tokens.tokens[first][np.flatnonzero(tokens.loss_mask[first])].tolist()
    assert trained_on == [*b"hello <b><|im_end|>\n", *"ja ß<|im_end|>\n".encode(), 256]
    trained_on = tokens.tokens[second][np.flatnonzero(tokens.loss_mask[second])].tolist()
    assert trained_on == [*b"hello <b><|im_end|>\n"]


def test_special_tokens_of_a_template_are_ids_and_its_end_is_no_second_one(tmp_path, offline, write_tokenizer):
    words = ("<unk>", "</s>", "<s>", "to", "be", "or", "not")
    tokenizer = write_tokenizer(words=words, special=("</s>", "<s>"))
    template = "<s> {% for m in messages %} {% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>"
    template += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    conversation = [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]
    tokens = prepare(tmp_path, template, [conversation], tokenizer=str(tokenizer))
    assert tokens.tokens.tolist() == [2, 3, 4, 5, 6, 1]
    assert tokens.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]


def test_what_a_row_lacks_is_not_there_and_tools_may_be_json(tmp_path, offline):
    calls = [[{"role": "assistant", "content": "x", "calls": [{"arguments": {key: 1}}]}] for key in ("city", "n")]
    tools = [json.dumps([{"name": "weather"}])] * 2
    pq.write_table(pa.table({"messages": calls, "tools": tools}), tmp_path / "chats.parquet")
    answers = "{% for m in messages %}{% generation %}{{ m.calls | tojson }}{% endgeneration %}\n{% endfor %}"
    (tmp_path / "t.jinja").write_text("{{ tools[0].name }}" + answers)
    data = DataConfig(
        source=str(tmp_path / "chats.parquet"), messages_field="messages", folder=str(tmp_path / "tokens"),
        chat_template=str(tmp_path / "t.jinja"),
    )  # fmt: skip
    tokens = TokenFile.open(prepare_tokens(data))
    text = bytes(i for i in tokens.tokens.tolist() if i < 256).decode()
    assert text == 'weather[{"arguments": {"city": 1}}]weather[{"arguments": {"n": 1}}]'
    assert tokens.loss_mask[tokens.tokens == 256].tolist() == [1, 1]
    pq.write_table(pa.table({"messages": calls, "tools": ["no json"] * 2}), tmp_path / "chats.parquet")
    with pytest.raises(DataError, match=r"row 1 of '.*chats\.parquet': field 'tools' is neither a list of tools nor"):
        prepare_tokens(data)


def test_what_decides_the_text_of_conversations_decides_the_folder(tmp_path, offline):
    prepared = [
        prepare(tmp_path, template, [CONVERSATION[:2]], **options)
        for template, options in ((CHATML, {}), (CHATML, {"loss_on": "all"}), (CHATML.replace("|>", ">"), {}))
    ]
    assert len({tokens.folder for tokens in prepared}) == 3
    answers, everything, _ = prepared
    assert answers.sha256 == everything.sha256 and answers.fingerprint != everything.fingerprint


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [{"content": "hi"}],
            r"row 1 of '.*chats\.jsonl': field 'messages': message 1 has no role; .* has content \(data\.max_bad",
        ),
        ([{"role": "user", "content": "hi"}], "holds no answer: 1 document and"),
    ],
)
def test_conversations_that_teach_nothing_are_refused(tmp_path, offline, messages, said):
    with pytest.raises(DataError, match=said):
        prepare(tmp_path, CHATML, [messages])


BAD_MESSAGES = {
    "no content": ({"role": "user"}, "(role user) has no content"),
    "null": ({"role": "user", "content": None}, "(role user) has no content"),
    "an answer that says and calls nothing": (
        {"role": "assistant", "tool_calls": []},
        "(role assistant) has no content and no tool_calls",
    ),
    "an empty list": ({"role": "tool", "content": []}, "(role tool) has an empty list as its content"),
    "a table": (
        {"role": "tool", "content": {"a": 1}},
        "(role tool) has content of type dict, not text; write it as text",
    ),
    "a number": ({"role": "user", "content": 7}, "(role user) has content of type int, not text"),
    "a string as a part": (
        {"role": "user", "content": ["hi"]},
        "(role user) has content whose part 1 is 'str'; parts ",
    ),
    "an image": (
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "url": "x"}]},
        '(role user) has content whose part 2 is \'image\'; parts are {"type": "text", "text": …}',
    ),
    "a part of text without it": (
        {"role": "user", "content": [{"type": "text"}]},
        "(role user) has content whose part 1 has no text; parts",
    ),
    "a misspelt role": (
        {"role": "assitant", "content": "hi"},
        "has role 'assitant'; use one of system, developer, user, assistant, tool, perhaps 'assistant', or one that ",
    ),
    "a role that nobody knows": (
        {"role": "x7", "content": "hi"},
        "has role 'x7'; use one of system, developer, user, ",
    ),
    "a role that is no text": ({"role": ["user"], "content": "hi"}, "has role ['user']; use one of system, "),
    "keys of another format": ({"from": "human", "value": "hi"}, "has no role; each message needs a role and its con"),
    "calls as text": ({"role": "assistant", "tool_calls": "[]"}, "has tool_calls of type str, not a list of calls"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_message_that_a_template_would_write_as_something_else_is_a_bad_row(tmp_path, offline, name):
    message, said = BAD_MESSAGES[name]
    bad = [CONVERSATION[0], message, CONVERSATION[1]]
    with pytest.raises(DataError, match=r"broke at row 2 of 'chats\.jsonl': field 'messages': message 2 ") as error:
        prepare(tmp_path, CHATML, [CONVERSATION, bad, CONVERSATION])
    assert said in str(error.value)
    tokens = prepare(tmp_path, CHATML, [CONVERSATION, bad, CONVERSATION], max_bad_rows=1)
    assert (tokens.num_documents, tokens.num_bad_rows) == (2, 1) and said in tokens.first_bad_row


def spell(tokens):
    return bytes(i for i in tokens.tokens.tolist() if i < 256).decode()


def test_roles_that_a_template_names_and_calls_without_content_are_taken(tmp_path, offline):
    template = "{% for m in messages %}{% if m.role == 'ipython' %}#{% endif %}{{ m.content }};"
    template += "{% for c in m.tool_calls or [] %}{{ c.name }}{% endfor %}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    conversation = [CONVERSATION[0], call, {"role": "ipython", "content": "7"}, CONVERSATION[1]]
    assert spell(prepare(tmp_path, template, [conversation])) == "hi;;add#7;hello <b>;"
    with pytest.raises(DataError, match=r"message 3 has role 'ipython'"):
        prepare(tmp_path, template.replace("'ipython'", "named"), [conversation])


def test_results_of_tools_are_mappings_where_a_template_asks_for_them(tmp_path, offline):
    template = "{% for m in messages %}{% if m.content is mapping %}{{ m.content | tojson }}"
    template += "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    result = {"role": "tool", "content": {"sum": 7}}
    conversation = [CONVERSATION[0], result, CONVERSATION[1]]
    assert spell(prepare(tmp_path, template, [conversation])) == 'hi;{"sum": 7};hello <b>;'
    with pytest.raises(DataError, match=r"message 1 \(role user\) has content of type dict"):
        prepare(tmp_path, template, [[result | {"role": "user"}, *conversation]])


PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"
)
ONLY_PARTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }};{% endfor %}", PARTS, ONLY_PARTS])
def test_text_and_parts_of_text_are_the_same_whichever_a_template_writes(tmp_path, offline, template):
    parts = [
        {"role": each["role"], "content": [{"type": "text", "text": part} for part in each["content"].partition(" ")]}
        for each in CONVERSATION
    ]
    for conversation in (CONVERSATION, parts, [*parts[:1], *CONVERSATION[1:]]):
        tokens = prepare(tmp_path, template, [conversation])
        assert spell(tokens) == "hi;hello <b>;é?;ja ß;"
        assert tokens.loss_mask.sum() == len("hello <b>;") + len("ja ß;".encode()) + 1


def test_conversations_without_an_answer_are_counted_unless_all_of_a_text_is_learnt(tmp_path, offline):
    conversations = [CONVERSATION, CONVERSATION[:1], CONVERSATION[:3], CONVERSATION[2:3]]
    tokens = prepare(tmp_path, CHATML, conversations)
    assert tokens.num_unanswered == 2
    (line,) = (each for each in describe_sources([SampledSource(tokens, 16, "it")]) if "without an answer" in each)
    assert line.startswith("note: 2 conversations of it without an answer: no message there has the role assistant")
    assert prepare(tmp_path, CHATML, conversations, loss_on="last").num_unanswered == 2
    tokens = prepare(tmp_path, CHATML, conversations, loss_on="all")
    assert tokens.num_unanswered == 0 and not any(
        "without" in each for each in describe_sources([SampledSource(tokens, 16)])
    )


def test_rules_for_conversations_that_change_leave_prepared_text_as_it_is(tmp_path, offline, monkeypatch):
    (tmp_path / "a.txt").write_text("to be")
    text = DataConfig(source=str(tmp_path / "a.txt"), folder=str(tmp_path / "tokens"))
    prepare(tmp_path, CHATML, [CONVERSATION])
    chats = DataConfig(
        source=str(tmp_path / "chats.jsonl"), messages_field="messages", folder=str(tmp_path / "tokens"),
        chat_template=str(tmp_path / "template.jinja"),
    )  # fmt: skip
    before = prepare_tokens(text), prepare_tokens(chats)
    assert prepare_tokens(chats) == before[1]
    monkeypatch.setattr("dtlayout.data.prepare._CHAT_FORMAT", 99)
    assert (prepare_tokens(text) == before[0], prepare_tokens(chats) == before[1]) == (True, False)


def test_the_limit_of_time_grows_with_the_square_of_a_long_conversation():
    sizes = {1: 1, 500: 1, 1000: 4, 4000: 64}
    assert {size: scale_limit(("find_answers", [{}] * size, None)) for size in sizes} == sizes
    assert scale_limit({"source": ""}) == 1  # what starts a process
