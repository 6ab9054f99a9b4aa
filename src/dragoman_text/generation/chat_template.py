"""Chat templates: the text of a conversation, written by Jinja in a sandbox with the names that transformers defines.

Templates are code of the model, or of a client. They are not rendered by transformers: it leaves out keys whose value
is None, which some templates test, and its versions differ.
"""

import datetime
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.sampling import format_value
from dragoman.core.text import Chat
from dragoman.system.threads import TimeLimitExceededError, run_in_time
from dragoman_text.generation.message_forms import AS_SENT, MessageForm, adapt, probe, with_tools_as_text

log = logging.getLogger("dragoman.generation")

T = TypeVar("T")
# Values of the parameter `sanitize_control_tokens`: in which texts control tokens are encoded as text.
SANITIZED = NOTHING, TOOL_RESULTS, EVERYTHING = "none", "tool_results", "all"
Message = Mapping[str, Any]

# Default of the parameter `prompt_s` of all engines: seconds for the template and the tokenization of a call's prompts,
# and for the examples that the template writes when it is loaded.
PROMPT_S = 30.0
# Sizes of products and powers in a template; they are computed without releasing the interpreter lock.
_MAX_BITS = 1 << 16
_MAX_REPEATED = 1 << 28
# Arguments of `render` that are not variables of a template.
_NO_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", "tokenize"})
# Maximum number of templates of requests whose forms are remembered.
_MAX_FORMS = 32
# Roles of every chat; an API writes "system" for "developer". A template may name others, as Llama's ipython.
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
# Roles of the results of tools; Llama's templates have the last.
_RESULTS = ("tool", "function", "ipython")
# Marks around control tokens in messages, which are to be encoded as text; characters for private use.
_START, _STOP = "\U000f0000", "\U000f0001"
_MARKED = re.compile(f"{_START}([^{_START}{_STOP}]*){_STOP}")
_MARKS = re.compile(f"[{_START}{_STOP}]")
_NO_TOKEN = re.compile("(?!)")
# Marks where a message ends that the model continues. Templates may remove the space at its end.
_END = "CONTINUE_FINAL_MESSAGE_TAG "


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which products and powers have a limited size."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            bits = _bits(left) * abs(right) if isinstance(right, int) else 0
        else:
            bits = _bits(left) + _bits(right)
            for repeated, count in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and isinstance(count, int):
                    bits = _MAX_BITS + 1 if len(repeated) * count > _MAX_REPEATED else 0
        if bits > _MAX_BITS:
            raise SecurityError(f"the result of the operator {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


class _GenerationTag(Extension):
    """`{% generation %}`, by which training finds the text of the model."""

    tags = {"generation"}  # noqa: RUF012 - declared by the base class

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which would reach inside it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"namespace: expected a name that does not begin with an underscore, got {name!r}")


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(r"\udb80\udc00", _START).replace(r"\udb80\udc01", _STOP) if ensure_ascii else text


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format_: datetime.datetime.now().strftime(format_),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=32)
def _own_roles(template: str) -> frozenset[str]:
    """Return the texts with which a template compares something: a role that is not among them has no meaning to it."""
    texts: set[str] = set()
    for compare in _environment().parse(template).find_all(nodes.Compare):
        for side in (compare.expr, *(operand.expr for operand in compare.ops)):
            items = side.items if isinstance(side, nodes.List | nodes.Tuple) else [side]
            texts |= {each.value for each in items if isinstance(each, nodes.Const) and isinstance(each.value, str)}
    return frozenset(texts)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
    continues: bool = False,
) -> str:
    """Return the text of a conversation. `continues`: it ends within the last message, which the model continues.

    Raises any exception that the template raises, and ValueError if the last message cannot be continued.
    """
    copies = [dict(message) for message in messages]
    if continues:
        copies[-1]["content"] = _mark_end(copies[-1].get("content"))
    text = _compile(template).render(
        {
            "documents": None,
            **variables,
            "messages": copies,
            "tools": [dict(tool) for tool in tools] or None,
            "add_generation_prompt": add_generation_prompt,
        }
    )
    if not continues:
        return text
    end = text.rfind(_END.strip())
    if end < 0:
        raise ValueError("the text of the last message is not at the end of the prompt, so it cannot be continued")
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


def _mark_end(content: Any) -> Any:
    """Return the content of a message with the mark after its last text. Raises ValueError if it has no text."""
    if isinstance(content, str):
        return content + _END
    parts = [dict(part) for part in content or ()]
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            part["text"] += _END
            return parts
    raise ValueError("the last message has no text to continue")


def try_template(function: Callable[[], T], limit_s: float) -> T:
    """Return the value of a function that renders a model's template with examples. Raises ModelFailed after the limit.

    It is for loads; a call has a limit of its own.
    """
    try:
        return run_in_time(function, limit_s)
    except TimeLimitExceededError:
        raise ModelFailed(
            f"chat template: expected the text of examples within {limit_s:g} s (parameter 'prompt_s'), got none: "
            "look for an endless loop in chat_template.jinja or tokenizer_config.json, or remove the template"
        ) from None


class Piece(str):
    """A control token in the text of a prompt that is to be encoded as text."""

    __slots__ = ()


def _mark(value: Any, control_tokens: re.Pattern[str]) -> Any:
    """Return a value of JSON with marks around the control tokens in its strings, and without other marks."""
    if isinstance(value, str):
        return control_tokens.sub(f"{_START}\\g<0>{_STOP}", _MARKS.sub("", value))
    if isinstance(value, Mapping):
        return {_mark(name, control_tokens): _mark(each, control_tokens) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(each, control_tokens) for each in value]
    return value


def _mark_results(messages: Sequence[Message], control_tokens: re.Pattern[str]) -> Sequence[Message] | None:
    """Return the messages with marks in the results of tools, None if these contain no control token."""
    results = [message["role"] in _RESULTS for message in messages]
    if not any(r and _contains(m.get("content"), control_tokens) for r, m in zip(results, messages, strict=True)):
        return None
    return [
        _mark(message, control_tokens if is_result else _NO_TOKEN)
        for is_result, message in zip(results, messages, strict=True)
    ]


def _contains(value: Any, control_tokens: re.Pattern[str]) -> bool:
    if isinstance(value, str):
        return control_tokens.search(value) is not None
    each = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(_contains(part, control_tokens) for part in each)


def _split(text: str) -> list[str]:
    """Return a text in pieces, without marks; a mark whose counterpart the template removed separates two pieces."""
    pieces: list[str] = []
    for i, part in enumerate(_MARKED.split(text)):
        pieces += [Piece(part)] if i % 2 else _MARKS.split(part)
    return [piece for piece in pieces if piece]


def _is_plain(message: Message) -> bool:
    """Return whether a message has the same form in every template."""
    return type(message.get("content")) is str and not message.get("tool_calls") and message["role"] != "tool"


class ChatTemplate:
    """The chat template of a model: one, or several by name.

    variables: special tokens by name. control_tokens: texts that are encoded as text where `sanitized` says: in the
        results of tools, or in messages, tools and variables.
    form: how the template takes messages, None without a template. Rendering it finds this out, for at most `limit_s`
        seconds. Raises ModelFailed after that.
    """

    def __init__(
        self,
        template: str | Mapping[str, str] | None,
        variables: Mapping[str, Any],
        control_tokens: Sequence[str] = (),
        *,
        sanitized: str = EVERYTHING,
        limit_s: float = PROMPT_S,
    ) -> None:
        self._templates = {"default": template} if isinstance(template, str) else dict(template or {})
        self._variables = variables
        longest_first = sorted(filter(None, control_tokens), key=len, reverse=True)
        self._control_tokens = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._sanitized = sanitized
        self._forms: dict[str, MessageForm] = {}
        self.form: MessageForm | None = None
        if self._templates.keys() & {"default", "tool_use"}:
            self.form = try_template(lambda: self._form(self._named(has_tools=True)), limit_s)
            log.debug("chat template: %s", self.form.describe())

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def text(self) -> str:
        """The template, "" for none; of several by name, the default one."""
        return self._templates.get("default", "")

    def describe(self) -> dict[str, Any] | None:
        """Return what the template shows of a conversation, for the metadata of the model."""
        return None if self.form is None else self.form.describe()

    def pieces(self, chat: Chat, messages: Sequence[Message]) -> Sequence[str]:
        """Return the text of a conversation with these messages, in pieces between which no token may begin or end
        elsewhere: those that are a `Piece` are encoded as text.

        Raises InvalidInput if the template rejects the messages, or a role is neither common nor one that it names.
        """
        if not chat.template:
            self._check_roles(messages, has_tools=bool(chat.tools))
        reserved = sorted(_NO_VARIABLES & chat.options.keys())
        if reserved:
            raise InvalidInput(f"chat_template_kwargs: expected variables of the template, got {', '.join(reserved)}")
        options = dict(chat.options)
        continues = bool(options.pop("continue_final_message", False))
        tools: Sequence[Mapping[str, Any]] = chat.tools
        is_marked = False
        try:
            if self._control_tokens is not None and self._sanitized == TOOL_RESULTS:
                marked = _mark_results(messages, self._control_tokens)
                is_marked, messages = marked is not None, messages if marked is None else marked
            if chat.template:  # its author decides what it shows
                template = chat.template
                form = AS_SENT if all(map(_is_plain, messages)) else self._form(template)
                form = replace(form, system=True, late_system=True, tools=True, calls=True)
            else:
                template = self._named(has_tools=bool(tools))
                form = self._form(template)
            if tools and not form.tools:
                messages, tools = with_tools_as_text(messages, tools), ()
            messages = adapt(messages, form)
            if self._control_tokens is not None and self._sanitized == EVERYTHING:
                is_marked = True
                messages, tools, options = (_mark(each, self._control_tokens) for each in (messages, tools, options))
            text = render(
                template,
                messages,
                tools=tools,
                variables={**self._variables, **options},
                add_generation_prompt=chat.add_generation_prompt,
                continues=continues,
            )
        except Exception as error:  # templates can raise any exception
            if chat.template:
                raise InvalidInput(f"chat_template: it rejects these messages: {error}") from error
            raise InvalidInput(f"messages: the model's chat template rejects them: {error}") from error
        return _split(text) if is_marked else (text,)

    def _check_roles(self, messages: Sequence[Message], *, has_tools: bool) -> None:
        """Raise InvalidInput for an unknown role: many templates would write it into the prompt, or leave it out."""
        for i, message in enumerate(messages):
            role = message["role"]
            if role not in _ROLES and role not in _own_roles(self._named(has_tools=has_tools)):
                known = f"{', '.join(_ROLES)}, or a role that the model's chat template names"
                raise InvalidInput(f"`messages[{i}].role` must be {known}; got {format_value(role)}")

    def _named(self, *, has_tools: bool) -> str:
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(sorted(self._templates)) or "none"
            raise InvalidInput(f"expected a chat template with the name 'default', got {names}")
        return self._templates[name]

    def _form(self, template: str) -> MessageForm:
        form = self._forms.get(template)
        if form is None:
            form = probe(lambda messages, tools: render(template, messages, tools=tools, variables=self._variables))
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[template] = form
        return form
