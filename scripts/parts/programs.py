"""What a run does in the sandbox, in a process that is already locked down: see scripts/parts/sandbox.py.

`do_program` runs a program that reads and prints. The verifier `code` has two processes, so that a program has no part
in a comparison: `do_calls` loads the program and answers calls, `do_tests` runs the tests.

Values pass between the two as JSON of plain data, and are copies. Containers among them are kept equal for the length
of a test: each message has what its side has changed in them. Functions, classes and objects that a test makes by a
capitalized name stay with the program, and the test has a Handle of each. Exceptions come back by the names of their
classes. A result that is anything else is unsupported: it fails the test, and is counted.
"""

import _thread
import ast
import atexit
import builtins
import functools
import io
import itertools
import json
import operator
import os
import resource
import socket
import sys
import traceback
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from datetime import time as datetime_time
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

FRAME_BYTES = 16 * 2**20  # for one message between a test and the program
MAX_ITEMS = 10_000  # of an iterator, which is sent as what it yields
MAX_SHARED = 50  # containers of a test that are kept equal; beyond, those of earlier calls are forgotten

# --- Programs ---------------------------------------------------------------------------------------------------------


def open_device(original: Any, null: int, path: Any, *args: Any, **keywords: Any) -> Any:
    """open() or os.open(), except for standard input and /dev/null, which no run may open as files: duplicates them."""
    if path not in (os.devnull, "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"):
        return original(path, *args, **keywords)
    descriptor = os.dup(null if path == os.devnull else 0)
    if original.__module__ == "posix":
        return descriptor
    return original(descriptor, *args, **keywords)


def execute(source: bytes, name: str, null: int) -> dict[str, Any]:
    """Runs the program as module `name`. Returns its names. null: a descriptor of /dev/null."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__file__ = "program.py"
    sys.argv = ["program.py"]
    refused = resource.setrlimit  # Programs ask for a larger stack: for them that succeeds and does nothing
    resource.setrlimit = lambda kind, limits: None if kind == resource.RLIMIT_STACK else refused(kind, limits)
    builtins.open = io.open = functools.partial(open_device, io.open, null)
    os.open = functools.partial(open_device, os.open, null)
    exec(compile(source, "program.py", "exec"), vars(module))
    return vars(module)


def do_program(null: int) -> int:
    """Runs the program as a main program, whose end runs threads, atexit functions and flushes. Descriptors: 0 to 2
    standard input, output and error, 3 program. Returns the exit status."""
    stdout = sys.stdout
    status = 0
    try:
        execute(open(3, "rb").read(), "__main__", null)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
        traceback.print_exc(limit=-3)
    threading = sys.modules.get("threading")
    if threading:
        threading._shutdown()
    atexit._run_exitfuncs()
    stdout_now = sys.stdout
    stdout.flush()
    if stdout_now is not stdout:
        stdout_now.flush()
    return status & 0xFF


# --- Plain data -------------------------------------------------------------------------------------------------------

SCALARS = {str, int, float, bool, types.NoneType}  # in JSON as they are
# Other types are {name: [items]} in JSON, of containers their items, of these the arguments that make them
FIELDS = {
    complex: "real imag",
    range: "start stop step",
    Fraction: "numerator denominator",
    timedelta: "days seconds microseconds",
    date: "year month day",
    datetime_time: "hour minute second microsecond tzinfo",
    datetime: "year month day hour minute second microsecond tzinfo",
}
MUTABLE = (list, dict, set, deque, bytearray, Counter, OrderedDict, defaultdict)
KINDS = {kind.__name__: kind for kind in (*MUTABLE, tuple, frozenset, bytes, Decimal, *FIELDS)}
NUMBERS = "biufcSU"  # kinds of numpy's types that hold plain data
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def is_numpy(value: Any) -> bool:
    """Whether this is an array or a number of numpy."""
    return type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", " ") in NUMBERS


def is_iterator(value: Any) -> bool:
    """Whether this is an iterator of Python's own, which is sent as what it yields."""
    kind = type(value)
    return isinstance(value, Iterator) and kind.__module__ != "program" and kind is not Handle


def is_mutable(value: Any) -> bool:
    return type(value) in MUTABLE or type(value).__name__ == "ndarray" and is_numpy(value)


def take_apart(value: Any) -> list:
    """The items that make a value of KINDS or numpy."""
    kind = type(value)
    if is_numpy(value):
        return value.ravel().tolist()
    if kind is Decimal:
        return [str(value)]
    if kind in FIELDS:
        return [getattr(value, field) for field in FIELDS[kind].split()]
    if not isinstance(value, dict):
        return [value.maxlen, *value] if kind is deque else list(value)
    items = [*value.keys(), *value.values()]
    return [value.default_factory, *items] if kind is defaultdict else items


def put_together(kind: type, items: list) -> Any:
    """The value of this type that take_apart gave these items of."""
    if kind is deque:
        return deque(items[1:], items[0])
    if kind is Decimal or kind in FIELDS:
        return kind(*items)
    if not issubclass(kind, dict):
        return kind(items)
    factory = items[:1] if kind is defaultdict else []
    items = items[len(factory) :]
    half = len(items) // 2
    return kind(*factory, dict(zip(items[:half], items[half:], strict=True)))


def fill(old: Any, new: Any) -> None:
    """Gives a container the content of another one of its type."""
    if type(new) is not type(old):
        raise ConnectionError("a container changed its type")
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif is_numpy(old):
        old[...] = new
    else:
        old.clear()
        (old.extend if isinstance(old, deque) else old.update)(new)


class Wire:
    """One end of the channel. shared: the containers that both ends have, in the same order."""

    def __init__(self, fd: int) -> None:
        self.stream = socket.socket(fileno=fd).makefile("rwb")
        self.forget()

    def forget(self) -> None:
        """Ends the sharing of containers."""
        self.shared: list[Any] = []
        self.numbers: dict[int, int] = {}  # id -> index in `shared`
        self.known: list[list] = []  # the items of each that the other end knows

    def refer(self, value: Any) -> dict:
        """The data of a value that is not plain."""
        raise NotImplementedError

    def resolve(self, name: str, body: Any) -> Any:
        """The value of such data."""
        raise NotImplementedError

    def share(self, value: Any) -> None:
        if is_mutable(value):
            self.numbers[id(value)] = len(self.shared)
            self.shared.append(value)

    def send(self, message: dict) -> None:
        self.stream.write(json.dumps(message).encode() + b"\n")
        self.stream.flush()

    def receive(self) -> dict:
        """Raises ConnectionError if the other side has ended."""
        line = self.stream.readline(FRAME_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("too long a reply" if line else "the program ended")
        return json.loads(line)

    def note(self) -> None:
        """From now on, changes of the shared containers are changes of this end."""
        self.known = [take_apart(value) for value in self.shared]

    def changes(self) -> list:
        """[number, content] of each shared container whose items are others than at the last note."""
        changed = []
        for number, old in enumerate(self.known):
            new = take_apart(self.shared[number])
            if len(new) != len(old) or any(map(operator.is_not, new, old)):
                changed.append(number)
        return [[number, self.content(self.shared[number])] for number in changed]

    def apply(self, changes: list) -> None:
        for number, data in changes:
            fill(self.shared[number], self.decode_content(data))

    def encode(self, value: Any) -> Any:
        """The value as JSON data. Its containers are shared from now on."""
        if type(value) in SCALARS:
            return value
        if id(value) in self.numbers:
            return {"shared": self.numbers[id(value)]}
        data = self.content(value)
        self.share(value)
        return data

    def encode_items(self, values: list) -> list:
        if SCALARS.issuperset(map(type, values)):
            return values
        return [self.encode(value) for value in values]

    def content(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            return self.encode_items(value)
        if KINDS.get(kind.__name__) is kind:
            return {kind.__name__: self.encode_items(take_apart(value))}
        if is_numpy(value):
            return {"numpy": [value.dtype.str, list(value.shape), self.encode_items(take_apart(value))]}
        if kind is type and vars(builtins).get(value.__name__) is value:
            return {"type": value.__name__}
        if is_iterator(value):
            items = list(itertools.islice(value, MAX_ITEMS + 1))
            if len(items) <= MAX_ITEMS:
                return {"iterator": self.encode_items(items)}
        return self.refer(value)

    def decode(self, data: Any) -> Any:
        """The value of what `encode` gave. Raises an Exception for other data."""
        if isinstance(data, dict) and "shared" in data:
            return self.shared[data["shared"]]
        value = self.decode_content(data)
        self.share(value)
        return value

    def decode_items(self, data: list) -> list:
        if SCALARS.issuperset(map(type, data)):
            return data
        return [self.decode(item) for item in data]

    def decode_content(self, data: Any) -> Any:
        if isinstance(data, list):
            return self.decode_items(data)
        if not isinstance(data, dict):
            return data
        ((name, body),) = data.items()
        if name in KINDS:
            return put_together(KINDS[name], self.decode_items(body))
        if name == "type" and isinstance(vars(builtins).get(body), type):
            return vars(builtins)[body]
        if name == "iterator":
            return iter(self.decode_items(body))
        if name != "numpy":
            return self.resolve(name, body)
        dtype, shape, items = body
        numpy = __import__("numpy")
        if numpy.dtype(dtype).kind not in NUMBERS:
            raise ValueError(f"{dtype} is no plain data")
        return numpy.array(self.decode_items(items), dtype).reshape(shape)[()]


# --- The program's end ------------------------------------------------------------------------------------------------


def names_of(kind: type) -> list[list[str]]:
    """Module and name of a class and its bases."""
    return [[base.__module__, base.__name__] for base in kind.__mro__]


class Calls(Wire):
    """Does what the tests ask. They know a value that is not plain data by a number."""

    def __init__(self, fd: int, null: int) -> None:
        super().__init__(fd)
        self.null = null
        self.names: dict[str, Any] = {}  # of the program
        self.kept: dict[int, Any] = {}

    def refer(self, value: Any) -> dict:
        self.kept[id(value)] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [id(value), names_of(value)]}
        return {"function" if isinstance(value, FUNCTIONS) else "object": id(value)}

    def resolve(self, name: str, body: Any) -> Any:
        return self.kept[body]

    def answer(self, request: dict) -> dict:
        """The changes of shared containers, and {"ok": result} or {"error": its classes, arguments and text}."""
        if request["forget"]:
            self.forget()
        self.apply(request["changes"])
        args = self.decode_items(request["args"])
        keywords = {name: self.decode(value) for name, value in request["keywords"].items()}
        self.note()
        try:
            result = getattr(self, request["do"])(*args, **keywords)
        except BaseException as error:
            changes = self.changes()
            details = [names_of(type(error)), self.encode_items([*error.args]), str(error)]
            return {"changes": changes, "error": details}
        changes = self.changes()
        try:
            return {"changes": changes, "ok": self.encode(result)}
        except Exception:  # such as one of too deep a value: no plain data
            return {"changes": changes, "ok": self.refer(result)}

    def load(self) -> dict[str, str]:
        """Runs the program. Returns its names, and of each whether it is a constant, its own, or of another module."""
        self.names = execute(open(3, "rb").read(), "program", self.null)
        found = {}
        for name, value in self.names.items():
            is_own = getattr(value, "__module__", "") == "program"
            found[name] = "own" if is_own else "other" if callable(value) else "constant"
        return found

    def look_up(self, name: str) -> Any:
        return self.names[name]

    def call(self, function: Any, /, *args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    getattr = staticmethod(getattr)
    setattr = staticmethod(setattr)


def do_calls(null: int) -> NoReturn:
    """Does what the tests ask, first of all to load the program. Descriptors: 3 program, 4 stream."""
    calls = Calls(4, null)
    sys.set_int_max_str_digits(0)
    while True:
        calls.send(calls.answer(calls.receive()))


# --- The tests' end ---------------------------------------------------------------------------------------------------


class Unsupported(BaseException):
    """A test has come upon what is no plain data."""


class Program(Wire):
    """The program, as the tests have it. It is not trusted: nothing that it sends decides a comparison.

    unsupported: why this test cannot be judged. Then it is the test's fault, and no program can pass, if the test sends
    what is no plain data, or needs more than methods and attributes of an object that it has made.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.lock = _thread.RLock()
        self.handles: dict[int, Handle] = {}
        self.exceptions: dict[str, type] = {}  # classes of the program
        self.exception_numbers: dict[Any, int] = {}
        self.raised: BaseException | None = None
        self.broken = False  # The program has ended or broken the protocol: it fails all later tests
        self.keeps_objects = True
        self.begin()

    def begin(self) -> None:
        self.unsupported = ""
        self.is_tests_fault = False
        self.forgets = True  # with the next message
        self.doubts: set[str] = set()  # why a test may fail for a right program

    def refuse(self, what: str, is_tests_fault: bool = False) -> NoReturn:
        """Ends a test, even one that catches every exception: see do_tests."""
        if not self.unsupported:
            self.unsupported = f"unsupported: {what}"
            self.is_tests_fault = is_tests_fault
        self.forgets = True  # The two ends may have stopped at different containers
        raise Unsupported(self.unsupported)

    def refer(self, value: Any) -> dict:
        if type(value) is Handle:
            return {"object": vars(value)["number"]}
        if isinstance(value, type) and value in self.exception_numbers:
            return {"object": self.exception_numbers[value]}
        self.refuse(f"a {type(value).__name__} of the test is no plain data", is_tests_fault=True)

    def resolve(self, name: str, body: Any) -> Any:
        if name == "exception":
            number, names = body
            kind = self.exception_class(names)
            self.exception_numbers[kind] = number
            return kind
        if name not in ("object", "function"):
            raise ValueError(f"{name} is not a value")
        if name == "object" and not self.keeps_objects:
            self.refuse("a result is no plain data")
        return self.handles.setdefault(body, Handle(self, body))

    def ask(self, action: str, args: tuple, keywords: dict[str, Any], keeps_objects: bool = False) -> Any:
        """Asks the program. Makes its changes of shared containers here too, and raises its exceptions here."""
        with self.lock:
            if len(self.shared) > MAX_SHARED:
                self.forgets = True
                self.doubts.add("containers of earlier calls")
            if any(map(is_iterator, args)):
                self.doubts.add("an iterator, which the program takes whole")
            message: dict[str, Any] = {"do": action, "forget": self.forgets}
            if self.forgets:
                self.forget()
                self.forgets = False
            message["changes"] = self.changes()
            message["args"] = self.encode_items([*args])
            message["keywords"] = {name: self.encode(value) for name, value in keywords.items()}
            self.keeps_objects = True
            try:
                self.send(message)
                reply = self.receive()
                self.apply(reply["changes"])
                if "error" in reply:
                    error = self.exception(*reply["error"])
                else:
                    error = None
                    self.keeps_objects = keeps_objects
                    result = self.decode(reply["ok"])
                self.note()
            except Unsupported:
                raise
            except BaseException as failure:
                self.broken = True
                raise ConnectionError(describe(failure)) from None
        if error is None:
            return result
        self.raised = error
        raise error

    def exception(self, names: list, args: list, text: str) -> BaseException:
        """An exception of the program, as one of the same name here."""
        kind: Any = self.exception_class(names)
        values = self.decode_items(args)
        try:
            error = kind(*values)
        except Exception:  # Its class wants other arguments
            error = kind.__new__(kind, *values)
        vars(error)["_text"] = str(text)
        return error

    def exception_class(self, names: list[list[str]]) -> type[Exception]:
        """The exception of this name, of Python or of the program. names: see names_of."""
        (module, name), *above = names
        kind = vars(builtins).get(name, self.exceptions.get(name))
        if kind is None and module.partition(".")[0] in sys.stdlib_module_names and module in sys.modules:
            kind = getattr(sys.modules[module], name, None)
        if kind is None:
            own = {"__str__": lambda error: vars(error).get("_text") or Exception.__str__(error)}
            kind = self.exceptions[name] = type(name, (self.exception_class(above),), own)
        # StopIteration would silently end all(map(..)), and what is no Exception could end this process
        if not issubclass(kind, Exception) or issubclass(kind, StopIteration):
            return RuntimeError
        return kind


class Handle:
    """A function, class or object that stays with the program, which calls it and gives its attributes. is_class,
    is_made: the test has it by a capitalized name, or has made it by calling one."""

    def __init__(self, program: Program, number: int) -> None:
        vars(self).update(program=program, number=number, is_class=False, is_made=False)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        is_class = vars(self)["is_class"]
        result = vars(self)["program"].ask("call", (self, *args), keywords, keeps_objects=is_class)
        if type(result) is Handle and is_class:
            vars(result)["is_made"] = True
        return result

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return vars(self)["program"].ask("getattr", (self, name), {}, keeps_objects=True)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["program"].ask("setattr", (self, name, value), {})

    def refuse(self, name: str, *_: Any) -> None:
        what = f"what the test needs {name} of is no plain data"
        vars(self)["program"].refuse(what, vars(self)["is_made"])


OPERATORS = (
    "eq ne lt le gt ge bool hash str repr format int float complex index round abs neg pos invert len iter next "
    "reversed contains getitem setitem delitem delattr enter exit await copy deepcopy instancecheck subclasscheck "
    "mro_entries add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul and rand or "
    "ror xor rxor"
).split()
for _name in OPERATORS:
    setattr(Handle, f"__{_name}__", functools.partialmethod(vars(Handle)["refuse"], _name))


class Scope(dict):
    """The global names of the tests. Those that it lacks are the program's, as they are at that moment."""

    def __init__(self, names: dict[str, Any], program: Program) -> None:
        super().__init__(names)
        self.program = program

    def __missing__(self, name: str) -> Any:
        value = self.program.ask("look_up", (name,), {}, keeps_objects=True)
        if type(value) is Handle:
            self[name] = value
            vars(value)["is_class"] = vars(value)["is_made"] = name[:1].isupper()
        return value


def describe(error: BaseException) -> str:
    if isinstance(error, AssertionError):
        return "the assertion failed"
    name = type(error).__name__
    text = f"{name}: {error}" if str(error) else name
    return text[:200]


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
    "tempfile unittest unittest.mock vars() warnings weakref".split()
)


class Words:
    """The names that a test reads and sets, and those of APART. doubts: why it may fail for a right program."""

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
                case ast.Compare(left, [ast.Is() | ast.IsNot()], [right]):
                    if not isinstance(left, ast.Constant) and not isinstance(right, ast.Constant):
                        self.doubts.add("whether two values are one object")
        self.apart = (used | self.read) & (APART | {"__"})


@functools.cache
def standard_names() -> frozenset[str]:
    """The names that a test has without the program."""
    names: dict[str, Any] = {}
    exec(STANDARD, names)
    return frozenset(vars(builtins).keys() | names.keys() | SLOW_STANDARD.keys())


def names_wanted(tests: list[str]) -> set[str]:
    """The names that tests read, and that neither they nor Python define. Without one, they test no program."""
    words = [Words(test) for test in tests]
    read = set().union(*(word.read for word in words))
    return read - standard_names() - set().union(*(word.set for word in words))


class Tests:
    """The tests of a label, run one after the other in one scope. Names of builtins and of the standard library are
    those of this process, because a program's own `sum` or `isclose` must not judge its results."""

    def __init__(self, tests: list[str]) -> None:
        self.words = [Words(test) for test in tests]
        mentioned = set().union(*(words.read for words in self.words))
        self.standard = {**vars(builtins), "__name__": "test"}
        exec(STANDARD, self.standard)
        for name, module in SLOW_STANDARD.items():
            if name in mentioned:
                self.standard[name] = __import__(module)
        self.wanted = mentioned - self.standard.keys()
        self.program = Program(4)
        self.scope = Scope(self.standard, self.program)
        self.kinds: dict[str, str] = {}  # of the program's names: see Calls.load
        self.lost: set[str] = set()  # what earlier tests have set, and later ones lack

    def run(self, test: str, words: Words) -> str | None:
        """None if the test has passed, else its problem, or why it is not known whether the program is right."""
        program = self.program
        program.begin()
        for name in self.kinds:  # A variable of this name lasts for one test, and so does one of a builtin's name
            self.scope.pop(name, None)
        self.scope.update(self.standard)
        self.lost |= words.set & self.standard.keys()
        problem = None
        try:
            exec(compile(test, "test", "exec"), self.scope)
        except BaseException as error:
            problem = describe(error)
            program.is_tests_fault |= isinstance(error, ImportError) and error is not program.raised
            if isinstance(error, AttributeError) and isinstance(error.obj, (BaseException, Iterator)):
                program.doubts.add("an attribute of an exception or iterator")
            if isinstance(error, NameError) and error.name in self.kinds:
                program.doubts.add("a name of the program in the body of a class")
        if program.broken:
            problem = problem or "the program broke the protocol"
        if problem is None and not self.wanted & self.kinds.keys():
            program.is_tests_fault = self.wanted <= set().union(*(words.set for words in self.words))
            return "unsupported: the tests use no name that the program defines"
        if problem is None or program.unsupported:
            return program.unsupported or problem
        if words.apart:
            program.is_tests_fault = True
            return f"unsupported: {min(words.apart)} of the test is not the program's"
        doubts = program.doubts | words.doubts | self.shared_names(words)
        if doubts:
            program.unsupported = f"unsupported: {min(doubts)}"
        return program.unsupported or problem

    def shared_names(self, words: Words) -> set[str]:
        """The names of a test that may mean something else in the program, or in an earlier test."""
        own = {name for name, kind in self.kinds.items() if kind == "own"}
        constants = {name for name, kind in self.kinds.items() if kind == "constant"}
        apart = (words.read - words.set) & self.lost
        apart |= (words.read | words.set) & own & self.standard.keys()
        apart |= words.set & constants
        return apart


def do_tests(null: int) -> int:
    """Runs the tests. Descriptors: 3 {"tests", "skip"}, 4 stream, 5 results, 6 steps. Writes a line of results,
    [problem or null, whether it is unsupported, whether no program can pass], for the loading of the program and for
    each test, except the first `skip` tests."""
    job = json.loads(open(3, "rb").read())
    sys.set_int_max_str_digits(0)
    tests = Tests(job["tests"])
    program = tests.program
    problem = None
    try:
        tests.kinds = program.ask("load", (), {})
    except BaseException as error:
        problem = describe(error)
    report(problem, program)
    if problem:
        return 0
    for number, words in enumerate(tests.words):
        if number < job["skip"]:
            tests.lost |= words.set - tests.kinds.keys()
            os.write(6, b".")
        elif not program.broken:
            report(tests.run(job["tests"][number], words), program)
    return 0


def report(problem: str | None, program: Program) -> None:
    line = [problem, bool(program.unsupported), program.is_tests_fault]
    os.write(5, json.dumps(line).encode() + b"\n")
    os.write(6, b".")
