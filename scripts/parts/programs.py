"""What a run does in the sandbox, in a process that is already locked down: see scripts/parts/sandbox.py.

`do_program` runs a program that reads and prints. The verifier `code` has two processes, so that a program has no part
in a comparison: `do_calls` loads the program and answers calls, `do_tests` runs the tests.

Values pass between the two as JSON of plain data, and are copies. With the result of a call come the contents that the
containers among its arguments have now. Anything else stays with the program, and the test has a Handle of it, which it
can call. It has attributes if the test has made the object by a capitalized name. Exceptions come back by the names of
their classes. A test that needs more of a result than that is unsupported: it fails, and is counted.
"""

import ast
import atexit
import builtins
import functools
import io
import itertools
import json
import os
import resource
import socket
import sys
import traceback
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from datetime import time as datetime_time
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

FRAME_BYTES = 16 * 2**20  # for one message between a test and the program
NULL = 8  # the descriptor of /dev/null
MAX_ITEMS = 10_000  # of an iterator, which is sent as what it yields

# --- Programs ---------------------------------------------------------------------------------------------------------


REAL_OPEN = io.open


def open_device(path: Any, *args: Any, **keywords: Any) -> Any:
    """open(), except for standard input and /dev/null, which no run may open as files: duplicates them."""
    if path in (os.devnull, "/dev/stdin"):
        path = os.dup(NULL if path == os.devnull else 0)
    return REAL_OPEN(path, *args, **keywords)


def execute(source: bytes, name: str) -> types.ModuleType:
    """Runs the program as module `name`."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__file__ = "program.py"
    sys.argv = ["program.py"]
    refused = resource.setrlimit  # Programs ask for a larger stack: for them that succeeds and does nothing
    resource.setrlimit = lambda kind, limits: None if kind == resource.RLIMIT_STACK else refused(kind, limits)
    builtins.open = io.open = open_device
    exec(compile(source, "program.py", "exec"), vars(module))
    return module


def do_program() -> int:
    """Runs the program as a main program, whose end runs threads, atexit functions and flushes. Descriptors: 0 to 2
    standard input, output and error, 3 program. Returns the exit status."""
    stdout = sys.stdout
    status = 0
    try:
        execute(open(3, "rb").read(), "__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
        traceback.print_exc(limit=-3)
    threading = sys.modules.get("threading")
    if threading:
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (stdout, sys.stdout):
        stream.flush()
    return status & 0xFF


# --- Plain data -------------------------------------------------------------------------------------------------------

SCALARS = {str, int, float, bool, types.NoneType}  # in JSON as they are; other types are {name: [items]}
OF_ITEMS = (list, tuple, set, frozenset, bytes, bytearray, deque)
OF_PAIRS = (dict, Counter, OrderedDict, defaultdict)
OF_ARGUMENTS = (range, Decimal, Fraction, timedelta, date, datetime_time, datetime)  # as pickle knows them
KINDS = {kind.__name__: kind for kind in (*OF_ITEMS, *OF_PAIRS, *OF_ARGUMENTS, complex)}
MUTABLE = {list, set, bytearray, deque, *OF_PAIRS}
NUMBERS = "biufcSU"  # kinds of numpy's types that hold plain data


def is_numpy(value: Any) -> bool:
    """Whether this is an array or a number of numpy."""
    return type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", " ") in NUMBERS


def is_mutable(value: Any) -> bool:
    return type(value) in MUTABLE or type(value).__name__ == "ndarray" and is_numpy(value)


def take_apart(value: Any) -> tuple[str, list]:
    """The name of a value's type, and the items that make it. The name is empty if the value is no plain data."""
    kind = type(value)
    if is_numpy(value):
        return "numpy", [value.dtype.str, value.ndim, *value.shape, *value.ravel().tolist()]
    if KINDS.get(kind.__name__) is not kind:
        return "", []
    if kind in OF_PAIRS:
        items = [*value.keys(), *value.values()]
    elif kind in OF_ITEMS:
        items = [*value]
    else:
        items = [value.real, value.imag] if kind is complex else [*value.__reduce__()[1]]
    if kind is deque:
        items.append(value.maxlen)
    elif kind is defaultdict:
        items.append(value.default_factory)
    return kind.__name__, items


def put_together(name: str, items: list) -> Any:
    """The value that take_apart gave these items of."""
    if name == "numpy":
        dtype, ndim, *items = items
        numpy = __import__("numpy")
        if numpy.dtype(dtype).kind not in NUMBERS:
            raise ValueError(f"{dtype} is no plain data")
        return numpy.array(items[ndim:], dtype).reshape(items[:ndim])[()]
    kind: Any = KINDS[name]
    if kind in OF_PAIRS:
        factory = [items.pop()] if kind is defaultdict else []
        half = len(items) // 2
        return kind(*factory, dict(zip(items[:half], items[half:], strict=True)))
    if kind is deque:
        return deque(items[:-1], items[-1])
    return kind(items) if kind in OF_ITEMS else kind(*items)


def fill(container: Any, items: list) -> None:
    """Gives it the content that take_apart gave these items of."""
    new = put_together("numpy" if is_numpy(container) else type(container).__name__, items)
    if isinstance(container, (list, bytearray)):
        container[:] = new
    elif is_numpy(container):
        container[...] = new
    else:
        container.clear()
        (container.extend if isinstance(container, deque) else container.update)(new)


class Wire:
    """One end of the channel. refer: gives the data of a value that is not plain; resolve: gives it back. shared: the
    containers of a call, which both ends number in the same order, so that one that occurs twice remains one."""

    def __init__(self, fd: int, refer: Callable[[Any], dict], resolve: Callable[[str, Any], Any]) -> None:
        self.stream = socket.socket(fileno=fd).makefile("rwb")
        self.refer = refer
        self.resolve = resolve
        self.begin_call()

    def begin_call(self) -> None:
        self.shared: list[Any] = []
        self.numbers: dict[int, int] = {}  # id -> index in `shared`

    def share(self, value: Any) -> Any:
        if is_mutable(value):
            self.numbers[id(value)] = len(self.shared)
            self.shared.append(value)
        return value

    def send(self, message: dict) -> None:
        self.stream.write(json.dumps(message).encode() + b"\n")
        self.stream.flush()

    def receive(self) -> dict:
        """Raises ConnectionError if the other side has ended."""
        line = self.stream.readline(FRAME_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("too long a reply" if line else "the program ended")
        return json.loads(line)

    def encode(self, value: Any) -> Any:
        """The value as JSON data."""
        if type(value) in SCALARS:
            return value
        if id(value) in self.numbers:
            return {"shared": self.numbers[id(value)]}
        name, items = take_apart(value)
        if name:
            data = {name: self.encode_items(items)}
            self.share(value)
            return data
        if type(value) is type and vars(builtins).get(value.__name__) is value:
            return {"type": value.__name__}
        return self.refer(value)

    def encode_items(self, values: list) -> list:
        if SCALARS.issuperset(map(type, values)):
            return values
        return [self.encode(value) for value in values]

    def decode(self, data: Any) -> Any:
        """The value of what `encode` gave. Raises an Exception for other data."""
        if type(data) in SCALARS:
            return data
        ((name, body),) = data.items()
        if name == "shared":
            return self.shared[body]
        if name in KINDS or name == "numpy":
            return self.share(put_together(name, self.decode_items(body)))
        if name == "type" and isinstance(vars(builtins).get(body), type):
            return vars(builtins)[body]
        return self.resolve(name, body)

    def decode_items(self, data: list) -> list:
        if SCALARS.issuperset(map(type, data)):
            return data
        return [self.decode(item) for item in data]


# --- The program's end ------------------------------------------------------------------------------------------------


def names_of(kind: type) -> list[list[str]]:
    """Module and name of a class and its bases."""
    return [[base.__module__, base.__name__] for base in kind.__mro__]


class Calls(Wire):
    """Does what the tests ask. They know a value that is not plain data by a number."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, self.keep, lambda _, number: self.kept[number])
        self.kept: dict[int, Any] = {}  # 0: the program

    def keep(self, value: Any) -> dict:
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": names_of(value)}
        if isinstance(value, Iterator) and type(value).__module__ != "program":
            items = list(itertools.islice(value, MAX_ITEMS + 1))
            if len(items) <= MAX_ITEMS:
                return {"iterator": self.encode_items(items)}
        self.kept[id(value)] = value
        return {"object": id(value)}

    def answer(self, request: dict) -> dict:
        """The contents of the arguments' containers, and {"ok": result} or {"error": its classes, arguments, text}."""
        self.begin_call()
        args = self.decode_items(request["args"])
        keywords = {name: self.decode(value) for name, value in request["keywords"].items()}
        given = [*self.shared]
        try:
            value = getattr(self, request["do"])(*args, **keywords)
            outcome = "ok"
        except BaseException as error:
            value = [names_of(type(error)), [*error.args], str(error)]
            outcome = "error"
        changes = [self.encode_items(take_apart(value)[1]) for value in given]
        try:
            data = self.encode(value)
        except Exception:  # such as one of too deep a value: no plain data
            data = self.refer(value)
        return {"changes": changes, outcome: data}

    def load(self) -> list[list[str]]:
        """Runs the program. Returns its names, those that it defines itself, and those of constants."""
        self.kept[0] = execute(open(3, "rb").read(), "program")
        names = vars(self.kept[0])
        own = []
        constants = []
        for name, value in names.items():
            if getattr(value, "__module__", "") == "program":
                own.append(name)
            elif not isinstance(value, (types.ModuleType, Callable)):
                constants.append(name)
        return [[*names], own, constants]

    def call(self, function: Any, /, *args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    getattr = staticmethod(getattr)
    setattr = staticmethod(setattr)


def do_calls() -> NoReturn:
    """Does what the tests ask, first of all to load the program. Descriptors: 3 program, 4 stream."""
    calls = Calls(4)
    sys.set_int_max_str_digits(0)
    while True:
        calls.send(calls.answer(calls.receive()))


# --- The tests' end ---------------------------------------------------------------------------------------------------

# What a test may do with a Handle besides calling it. CLOSED, a result: nothing, or the program would judge itself by
# its methods. OPEN, a name of the program, an attribute, or what the test makes by calling a CLASS, which is a
# capitalized name: ask for attributes.
CLOSED, OPEN, CLASS = range(3)
MAX_EXCHANGED = 100  # containers of which it is known whether the test has kept them
NOT_KEPT = max(sys.getrefcount(value) for value in [[]])  # references to what only a list has


class Unsupported(BaseException):
    """A test has come upon what is no plain data."""


class Program(Wire):
    """The program, as the tests have it. It is not trusted: nothing that it sends decides a comparison.

    unsupported: why this test cannot be judged. is_tests_fault: no program can pass it."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, self.number, self.receive_value)
        self.handles: dict[int, Handle] = {}
        self.level = CLOSED  # of objects that arrive
        self.exceptions: dict[str, type] = {}  # classes of the program
        self.broken = False  # The program has ended or broken the protocol: it fails all later tests
        self.begin_test()

    def begin_test(self) -> None:
        self.unsupported = ""
        self.is_tests_fault = False
        self.doubts: set[str] = set()  # why the test may fail for a right program
        self.exchanged: list[Any] = []  # its last containers

    def refuse(self, what: str, is_tests_fault: bool = False) -> NoReturn:
        """Ends a test, even one that catches every exception: see Tests.run."""
        if not self.unsupported:
            self.unsupported = f"unsupported: {what}"
            self.is_tests_fault = is_tests_fault
        raise Unsupported(self.unsupported)

    def number(self, value: Any) -> dict:
        if type(value) is Handle:
            return {"object": vars(value)["number"]}
        self.refuse(f"a {type(value).__name__} of the test is no plain data", is_tests_fault=True)

    def receive_value(self, name: str, body: Any) -> Any:
        if name == "exception":
            return self.exception_class(body)
        if name == "iterator":
            return iter(self.decode_items(body))
        if name != "object":
            raise ValueError(f"{name} is not a value")
        handle = self.handles.setdefault(body, Handle(self, body))
        vars(handle)["level"] = max(vars(handle)["level"], self.level)
        if vars(handle)["level"] == CLOSED:
            self.doubts.add("a result is no plain data")
        return handle

    def ask(self, action: str, args: tuple, keywords: dict[str, Any], level: int = CLOSED) -> Any:
        """Asks the program. Fills the containers among the arguments with their new contents, and raises the program's
        exceptions here. level: of a Handle that is the result."""
        self.begin_call()
        # A container is a copy on each side: what one side does to it later, the other does not see
        if any(sys.getrefcount(value) > NOT_KEPT for value in self.exchanged):
            self.doubts.add("a container of an earlier call")
        message: dict[str, Any] = {"do": action, "args": self.encode_items([*args])}
        message["keywords"] = {name: self.encode(value) for name, value in keywords.items()}
        given = [*self.shared]
        try:
            self.send(message)
            reply = self.receive()
            self.level = CLOSED
            for container, items in zip(given, reply["changes"], strict=True):
                fill(container, self.decode_items(items))
            if "error" in reply:
                result = self.exception(*self.decode(reply["error"]))
            else:
                self.level = level
                result = self.decode(reply["ok"])
        except BaseException as failure:
            self.broken = True
            raise ConnectionError(describe(failure)) from None
        values = [*args, *keywords.values(), result]
        # Twice, and so as if it was kept, what is from a name or an attribute: the test may have changed it
        self.exchanged += [value for value in values if is_mutable(value)] * (2 if action == "getattr" else 1)
        del self.exchanged[:-MAX_EXCHANGED]
        if "error" in reply:
            raise result
        return result

    def exception(self, names: list, args: list, text: str) -> BaseException:
        """An exception of the program, as one of the same name here."""
        kind: Any = self.exception_class(names)
        try:
            error = kind(*args)
        except Exception:  # Its class wants other arguments
            error = kind.__new__(kind, *args)
        vars(error)["program_text"] = str(text)
        return error

    def exception_class(self, names: list[list[str]]) -> type[Exception]:
        """The exception of this name, of Python or of the program. names: see names_of."""
        (module, name), *above = names
        kind = vars(builtins).get(name, self.exceptions.get(name))
        if kind is None and module.partition(".")[0] in sys.stdlib_module_names and module in sys.modules:
            kind = getattr(sys.modules[module], name, None)
        if kind is None:
            own = {"__str__": lambda error: vars(error).get("program_text") or Exception.__str__(error)}
            kind = self.exceptions[name] = type(name, (self.exception_class(above),), own)
        # StopIteration would silently end all(map(..)), and what is no Exception could end this process
        if not issubclass(kind, Exception) or issubclass(kind, StopIteration):
            return RuntimeError
        return kind


class Handle:
    """What stays with the program, which calls it and gives its attributes. level: CLOSED, OPEN or CLASS."""

    def __init__(self, program: Program, number: int) -> None:
        vars(self).update(program=program, number=number, level=CLOSED)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        level = OPEN if vars(self)["level"] == CLASS else CLOSED
        return vars(self)["program"].ask("call", (self, *args), keywords, level)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        if vars(self)["level"] == CLOSED:
            self.__refuse__(name)
        return vars(self)["program"].ask("getattr", (self, name), {}, OPEN)

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self)["level"] == CLOSED:
            self.__refuse__(name)
        vars(self)["program"].ask("setattr", (self, name, value), {})

    def __refuse__(self, name: str, *_: Any) -> None:
        vars(self)["program"].refuse(f"what the test needs {name} of is no plain data")


OPERATORS = (
    "eq ne lt le gt ge bool hash str repr format int float complex index round abs neg pos invert len iter next "
    "reversed contains getitem setitem delitem delattr enter exit await copy deepcopy instancecheck subclasscheck "
    "mro_entries add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul and rand or "
    "ror xor rxor"
).split()
for _name in OPERATORS:
    setattr(Handle, f"__{_name}__", functools.partialmethod(vars(Handle)["__refuse__"], _name))


class Scope(dict):
    """The global names of the tests. Those that it lacks are the program's, as they are at that moment."""

    program: Program

    def __missing__(self, name: str) -> Any:
        if name in SLOW_STANDARD:
            return __import__(SLOW_STANDARD[name])
        module = Handle(self.program, 0)
        value = self.program.ask("getattr", (module, name), {}, CLASS if name[:1].isupper() else OPEN)
        if type(value) is Handle:
            self[name] = value
        return value


def describe(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()[:200]


# What tests use without importing it, relying on the program's imports
STANDARD = """
import collections, copy, datetime, decimal, fractions, functools, heapq, itertools, json, math, operator, re, string
import sys, time, typing
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from math import inf, isclose, pi, sqrt
from typing import Any, Dict, List, Optional, Set, Tuple, Union
"""
SLOW_STANDARD = {"np": "numpy", "numpy": "numpy", "random": "random", "statistics": "statistics"}
# What a test has in its own process alone: the program's streams, seeds, tasks and settings are others
APART = set(
    "GeneratorType SystemExit StopIteration KeyboardInterrupt argv asyncio builtins dir() environ gc getcontext id() "
    "inspect localcontext logging mock patch redirect_stdout seed setcontext setrecursionlimit stderr stdin stdout "
    "tempfile threading unittest unittest.mock vars() warnings weakref".split()
)


class Words:
    """The names that a test reads and sets. doubts: why it may fail for a right program."""

    def __init__(self, test: str) -> None:
        self.read: set[str] = set()
        self.set: set[str] = set()
        self.doubts: set[str] = set()
        used: set[str] = set()
        for node in ast.walk(ast.parse(test)):
            match node:
                case ast.Name(name, ast.Load()):
                    self.read.add(name)
                case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                    self.set.add(name)
                case ast.alias(name, alias):
                    self.set.add(alias or name)
                    used.add(name)
                case ast.ImportFrom(str(module)):
                    used.add(module)
                case ast.Attribute(ast.Name(name), _, ast.Store()):
                    self.doubts.add(f"an attribute that the test gives {name}")
                case ast.Attribute(_, name):
                    used |= {name, "__" * name.startswith("__")}
                case ast.Call(ast.Name(name)):
                    used.add(f"{name}()")
                case ast.Compare(_, [ast.Is() | ast.IsNot()], [ast.Name(name)]) if not hasattr(builtins, name):
                    self.doubts.add(f"whether a value is {name} itself")
        self.doubts |= (used | self.read) & (APART | {"__"})


@functools.cache
def standard_names() -> dict[str, Any]:
    """What a test has without the program."""
    names = {**vars(builtins), "__name__": "test"}
    exec(STANDARD, names)
    return names


def names_wanted(tests: list[str]) -> set[str]:
    """The names that tests read, and that neither they nor Python define. Without one, they test no program."""
    words = [Words(test) for test in tests]
    read = set().union(*(word.read for word in words))
    return read - standard_names().keys() - SLOW_STANDARD.keys() - set().union(*(word.set for word in words))


class Tests:
    """The tests of a label, run one after the other in one scope. Names of builtins and of the standard library are
    those of this process, because a program's own `sum` or `isclose` must not judge its results."""

    def __init__(self, tests: list[str]) -> None:
        self.words = [Words(test) for test in tests]
        self.wanted = names_wanted(tests)
        self.program = Program(4)
        self.scope = Scope(standard_names())
        self.scope.program = self.program

    def load(self) -> str | None:
        """Has the program run, and learns its names: see Calls.load. Its problem, or None."""
        try:
            self.names, self.own, self.constants = map(set, self.program.ask("load", (), {}))
        except BaseException as error:
            return describe(error)
        return None if self.wanted & self.names else "it defines no name that the tests use"

    def run(self, test: str, words: Words) -> str | None:
        """None if the test has passed, else its problem, or why it is not known whether the program is right."""
        program = self.program
        program.begin_test()
        for name in self.names - standard_names().keys():  # A variable of this name lasts for one test
            self.scope.pop(name, None)
        problem = None
        try:
            exec(compile(test, "test", "exec"), self.scope)
        except BaseException as error:
            problem = describe(error)
            program.is_tests_fault |= isinstance(error, ImportError) and "program_text" not in vars(error)
            if isinstance(error, AttributeError) and isinstance(error.obj, (BaseException, Iterator)):
                program.doubts.add("an attribute of an exception or iterator")
            if isinstance(error, NameError) and error.name in self.names:
                program.doubts.add("a name of the program in the body of a class")
        if program.broken:
            problem = problem or "the program broke the protocol"
        doubts = program.doubts | words.doubts
        # What may mean something else in the program
        doubts |= words.set & self.constants | (words.read | words.set) & self.own & standard_names().keys()
        if problem and doubts and not program.unsupported:
            program.unsupported = f"unsupported: {min(doubts)}"
        return program.unsupported or problem


def do_tests() -> int:
    """Runs the tests. Descriptors: 3 tests, 4 stream, 5 results, 6 steps. Writes a line of results, [problem or null,
    whether it is unsupported, whether no program can pass], for the loading of the program and for each test."""
    sources = json.loads(open(3, "rb").read())
    sys.set_int_max_str_digits(0)
    tests = Tests(sources)
    problem = tests.load()
    report(problem, tests.program)
    for source, words in zip(sources, tests.words, strict=True):
        if problem is None and not tests.program.broken:
            report(tests.run(source, words), tests.program)
    return 0


def report(problem: str | None, program: Program) -> None:
    line = [problem, bool(program.unsupported), program.is_tests_fault]
    os.write(5, json.dumps(line).encode() + b"\n")
    os.write(6, b".")
