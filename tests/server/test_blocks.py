"""The streaming turn parser, against tml_renderers' batch parser and on what that one refuses."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tml_renderers import chat, v0

from inkling_rocm.engine.request import Update
from inkling_rocm.server.assemble import ChatChoice
from inkling_rocm.server.blocks import TurnParser
from tests.server.scripted import TOKENIZER, encode

RENDERER = v0.Renderer(TOKENIZER.native)
BATCH = RENDERER.render_for_completion(
    [chat.Message(chat.Text("hi"), chat.Author(chat.AuthorKind.User))]
)[1]

END = "<end_message>"
TURN_END = "<content_model_end_sampling>"
MODEL = "<message_model>"


def parse(ids, open_block=None):
    """The turn's parts in order: ("reasoning"|"content", text) or ("tool", name, arguments)."""
    parser = TurnParser(TOKENIZER.token_bytes, open_block=open_block)
    parts = []
    for delta in [d for token in ids for d in parser.feed(token)] + parser.finish():
        if delta.kind in ("reasoning", "content"):
            if parts and parts[-1][0] == delta.kind:
                parts[-1] = (delta.kind, parts[-1][1] + delta.text)
            else:
                parts.append((delta.kind, delta.text))
        elif delta.kind == "tool_name":
            assert sum(part[0] == "tool" for part in parts) == delta.index
            parts.append(("tool", delta.text, ""))
        elif delta.kind == "tool_arguments":
            parts[-1] = ("tool", parts[-1][1], parts[-1][2] + delta.text)
    return parts, parser


def batch_parts(ids):
    """The same from the batch parser; adjacent blocks of one kind are one part here."""
    parts = []
    for message in BATCH.parse_tokens(ids):
        content = message.content
        if isinstance(content, chat.InvokeTool) and content.text is None:
            parts.append(
                ("tool", content.name, {a.name: json.loads(a.value) for a in content.args})
            )
        elif isinstance(content, chat.InvokeTool):
            parts.append(("tool", message.author.name or "unknown", {"input": content.text}))
        elif isinstance(content, chat.Text | chat.Thinking) and content.text:
            kind = "content" if isinstance(content, chat.Text) else "reasoning"
            if parts and parts[-1][0] == kind:
                parts[-1] = (kind, parts[-1][1] + content.text)
            else:
                parts.append((kind, content.text))
    return parts


def loaded(parts):
    return [(*p[:2], json.loads(p[2])) if p[0] == "tool" else p for p in parts]


names = st.from_regex(r"[A-Za-z0-9_.:-]{1,24}", fullmatch=True)
texts = st.text(
    st.characters(codec="utf-8", exclude_characters="<>") | st.sampled_from('\n 語🙂é{}"\\'),
    max_size=40,
)
QUARTERS = st.integers(-(10**6), 10**6).map(lambda i: i / 4)  # the batch parser rounds some floats
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts | QUARTERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tool_blocks(draw, header):
    name = draw(names)
    args = draw(st.dictionaries(texts.filter(bool), values, max_size=3))
    layout = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]))
    fields = [("name", name), ("args", args)]
    if draw(st.booleans()):
        fields.reverse()
    body = json.dumps(dict(fields), separators=layout, ensure_ascii=draw(st.booleans()))
    title = draw(st.sampled_from([name, ""]))
    return encode(f"{header}{title}<content_invoke_tool_json>") + TOKENIZER.encode(body)


@st.composite
def turns(draw, headers=(MODEL, "")):
    ids = []
    for _ in range(draw(st.integers(1, 4))):
        header = draw(st.sampled_from(headers))
        kind = draw(st.sampled_from(["text", "thinking", "tool", "tool_text"]))
        if kind == "tool":
            ids += draw(tool_blocks(header))
        elif kind == "tool_text":
            # Without its author token the batch parser forgets this block's name.
            ids += encode(f"{MODEL}{draw(names)}<content_invoke_tool_text>")
            ids += TOKENIZER.encode(draw(texts))
        else:
            ids += encode(f"{header}<content_{kind}>") + TOKENIZER.encode(draw(texts))
        ids += encode(END)
    return ids + encode(TURN_END)


@settings(max_examples=250, deadline=None)
@given(turns())
def test_complete_turns_give_the_batch_result(ids):
    parts, parser = parse(ids)
    assert loaded(parts) == batch_parts(ids)
    assert parser.ended


def play(ids, sizes, stop=()):
    """The chat message of ids that arrive in updates of these sizes; its deltas add up to it."""
    choice = ChatChoice(0, TOKENIZER, stops=stop)
    sent, at = {"content": "", "reasoning_content": ""}, 0
    for size in itertools.cycle(sizes):
        part = tuple(ids[at : at + size])
        at += size
        reason = "stop" if at >= len(ids) else None
        for piece in choice.push(Update(index=0, token_ids=part, text="", finish_reason=reason)):
            for field in sent.keys() & piece["delta"].keys():
                sent[field] += piece["delta"][field]
        if choice.finish_reason is not None:
            break
    message = choice.message()
    calls = [c["function"] for c in message.get("tool_calls", [])]
    assert sent["content"] == (message["content"] or "")
    assert sent["reasoning_content"] == message.get("reasoning_content", "")
    return sent["content"], sent["reasoning_content"], [(c["name"], c["arguments"]) for c in calls]


chunkings = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(turns(), chunkings)
def test_any_chunking_gives_the_batch_result(ids, sizes):
    content, reasoning, calls = play(ids, sizes)
    parts = batch_parts(ids)
    assert content == "".join(p[1] for p in parts if p[0] == "content")
    assert reasoning == "".join(p[1] for p in parts if p[0] == "reasoning")
    assert [(name, json.loads(a)) for name, a in calls] == [p[1:] for p in parts if p[0] == "tool"]


@settings(max_examples=100, deadline=None)
@given(turns(), chunkings, st.lists(st.text("ab{}01\n", min_size=1, max_size=3), max_size=3))
def test_stop_strings_do_not_depend_on_the_chunking(ids, sizes, stop):
    assert play(ids, sizes, stop) == play(ids, [1], stop) == play(ids, [len(ids)], stop)


@settings(max_examples=100, deadline=None)
@given(turns(headers=(MODEL,)), st.data())
def test_truncated_turns_give_a_prefix(ids, data):
    cut = data.draw(st.integers(0, len(ids)))
    whole, _ = parse(ids)
    parts, _ = parse(ids[:cut])
    assert len(parts) <= len(whole)
    for got, wanted in zip(parts[:-1], whole, strict=False):
        assert got == wanted
    if parts:
        got, wanted = parts[-1], whole[len(parts) - 1]
        assert got[0] == wanted[0]
        assert wanted[-1].startswith(got[-1])
        if got[0] == "tool":
            assert got[1] == wanted[1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 300) | st.integers(199990, 200057), max_size=40))
def test_no_tokens_raise(ids):
    parse(ids)
    parse(ids, "text")
    parse(ids, "thinking")


def test_oracle_can_fail():
    ids = encode(f"{MODEL}<content_text>a{END}{TURN_END}")
    other = encode(f"{MODEL}<content_text>b{END}{TURN_END}")
    assert loaded(parse(ids)[0]) != batch_parts(other)


@pytest.mark.parametrize(
    ("turn", "parts"),
    [
        # A plain answer without any header, as after a template that opens the block.
        ("Hello there", [("content", "Hello there")]),
        ("Hello", [("content", "Hello")]),
        (f"Hello{END}{TURN_END}", [("content", "Hello")]),
        (f"日本{TURN_END}", [("content", "日本")]),
        ("Hello there<content_thinking>hm", [("content", "Hello there"), ("reasoning", "hm")]),
        # A turn that opens with a call: the name is no content.
        ("get_w<content_invoke_tool_json>", [("tool", "get_w", "")]),
        ('get_w<content_invoke_tool_json>{"name":"get_w","args":{"a', [("tool", "get_w", '{"a')]),
        ('<content_invoke_tool_json>{"na', []),
        (f"{MODEL}get_w", []),  # cut off in a header
        (
            f'{MODEL}<content_invoke_tool_json>{{"args":{{"a":1}},"name":"f"}}{END}',
            [("tool", "f", '{"a":1}')],
        ),
        # Payloads of another shape are passed on whole.
        (f'f<content_invoke_tool_json>{{"city":"SF"}}{END}', [("tool", "f", '{"city":"SF"}')]),
        (f"f<content_invoke_tool_json>oops{END}", [("tool", "f", "oops")]),
        (f'f<content_invoke_tool_json>{{"name":"f"}}{END}', [("tool", "f", "{}")]),
        # Turn ends inside a block; other authors; what may follow JSON.
        (f"<content_text>a{TURN_END}b", [("content", "a")]),
        ("<content_thinking>a<endoftext>", [("reasoning", "a")]),
        (f"<message_user><content_text>u{END}<content_text>a{END}", [("content", "a")]),
        ("<content_text>{}<begin_of_text>" + TURN_END, [("content", "{}")]),
        (f"<content_text>{{}}{END}<begin_of_text>{TURN_END}", [("content", "{}")]),
    ],
)
def test_turns_the_batch_parser_refuses(turn, parts):
    assert parse(encode(turn))[0] == parts


@pytest.mark.parametrize(("open_block", "kind"), [("text", "content"), ("thinking", "reasoning")])
def test_consumed_opener(open_block, kind):
    ids = encode(f"get_w{END}{MODEL}<content_text>b{END}{TURN_END}")
    assert parse(ids, open_block)[0] in (
        [(kind, "get_w"), ("content", "b")],
        [("content", "get_wb")],
    )


def test_plain_text_streams_token_by_token():
    parser = TurnParser(TOKENIZER.token_bytes)
    ids = encode("<content_text>The quick brown fox jumps over it")
    seen = [bool(parser.feed(token)) for token in ids]
    assert seen == [False] + [True] * (len(ids) - 1)
    headerless = TurnParser(TOKENIZER.token_bytes)
    ids = encode("The quick brown fox jumps over it")
    seen = [bool(headerless.feed(token)) for token in ids]
    assert seen[1:] == [True] * (len(ids) - 1)


def test_tool_arguments_stream():
    ids = encode('f<content_invoke_tool_json>{"name":"f","args":{"text":"one two three four"}}')
    parser = TurnParser(TOKENIZER.token_bytes)
    pieces = [d.text for token in ids for d in parser.feed(token) if d.kind == "tool_arguments"]
    assert len(pieces) >= 4
    assert "".join(pieces) == '{"text":"one two three four"}'


def test_characters_split_over_tokens():
    ids = encode("<content_text>🙂🏳️‍🌈 naïve 𓀀")
    assert len(ids) > 6
    assert parse(ids)[0] == [("content", "🙂🏳️‍🌈 naïve 𓀀")]
    pieces = []
    parser = TurnParser(TOKENIZER.token_bytes)
    for token in ids:
        pieces += [d.text for d in parser.feed(token)]
    assert "�" not in "".join(pieces)
    assert parse(encode("<content_text>𓀀")[:-1])[0] == []  # half a character is not shown


def test_reasoning_tokens_are_counted_by_id():
    thought = TOKENIZER.encode("one two three")
    ids = [*encode("<message_model><content_thinking>"), *thought, *encode(f"{END}<content_text>x")]
    assert parse(ids)[1].reasoning_tokens == len(thought)
