"""What an env server and the learner say to each other: csrc/rpcenv.proto without generated files, spaces as JSON.

The messages are built when this is imported, so that an env host needs neither protoc nor a compiler; a test compares
them with csrc/rpcenv.proto. Nothing here imports torch.
"""

import json
import math

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from gymnasium import spaces

from beast.errors import InputError

PROTOCOL = 6  # both sides' must be equal; raise it with every change to the meaning of a message
PACKAGE = "beast.rpc"
STREAM, DIAL = f"/{PACKAGE}.Environments/Stream", f"/{PACKAGE}.Environments/Dial"
HELLO_HEADER, TOKEN_HEADER = "hello-bin", "authorization"  # the learner's hello; of who calls
STREAM_HEADER = "beast-stream"  # of an env server that dials: 32 hexadecimal digits of its own and the stream's index
MAX_HELLO_BYTES = 2**20
MAKING_SECONDS = 240.0  # more while environments are made and first reset: 128 of Atari take 25 to 66 CPU seconds
MAX_TEXT = 1000  # characters of a message about the other host
MAX_STACK = 8  # frames of a stack
MAX_NUMBERS = 2**23  # of all Boxes of a space: a line of JSON must not fill the learner's memory
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()

# The messages of csrc/rpcenv.proto and their fields, which count from 1.
MESSAGES = {
    "FromServer": "ServerHello hello, bytes row, string error, bytes metrics, bytes deflated",
    "LearnerHello": "uint32 protocol, uint64 seed, string env, bool only_hello, bytes progress",
    "ServerHello": "uint32 protocol, string env, uint32 num_envs, repeated Field fields, Structure observation, "
    "Field action, string observation_space, string action_space, uint32 frames_per_step",
    "Field": "string name, string dtype, repeated int64 shape",
    "Structure": "uint32 field, Structure.Tuple tuple, Structure.Dict dict",
    "Structure.Tuple": "repeated Structure parts",
    "Structure.Dict": "repeated Structure.Dict.PartsEntry parts",
    "Structure.Dict.PartsEntry": "string key, Structure value",  # what protoc makes of a map
    "Array": "string dtype, repeated int64 shape, bytes data, repeated Array parts, Structure structure, "
    "bytes progress",
}
ONEOFS = {"FromServer": 3, "Structure": 3}  # messages with one of so many first fields, a oneof `kind`


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """csrc/rpcenv.proto as protoc describes it."""
    file = descriptor_pb2.FileDescriptorProto(name="rpcenv.proto", package=PACKAGE, syntax="proto3")
    messages: dict[str, descriptor_pb2.DescriptorProto] = {}
    for path, fields in MESSAGES.items():
        outer, _, name = path.rpartition(".")
        message = messages[path] = (messages[outer].nested_type if outer else file.message_type).add(name=name)
        if name.endswith("Entry"):
            message.options.map_entry = True
        if path in ONEOFS:
            message.oneof_decl.add(name="kind")
        for number, declaration in enumerate(fields.split(", "), 1):
            *repeated, kind, name = declaration.split()
            field = message.field.add(name=name, number=number)
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind in MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                field.type = field.Type.Value(f"TYPE_{kind.upper()}")
            if number <= ONEOFS.get(path, 0):
                field.oneof_index = 0
    service = file.service.add(name="Environments")
    for name, sent, answered in (("Stream", "Array", "FromServer"), ("Dial", "FromServer", "Array")):
        method = service.method.add(name=name, client_streaming=True, server_streaming=True)
        method.input_type, method.output_type = f".{PACKAGE}.{sent}", f".{PACKAGE}.{answered}"
    return file


_pool = descriptor_pool.DescriptorPool()  # not the default one, in which others may have a rpcenv.proto too
_pool.Add(file_descriptor())
FromServer, LearnerHello, ServerHello, Field, Structure, Array = (
    message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    for name in ("FromServer", "LearnerHello", "ServerHello", "Field", "Structure", "Array")
)


def structure_message(nest, field_index: dict[str, int]):
    """The Structure of a nest (tuples, lists, str-keyed dicts) whose leaves are names of fields."""
    if isinstance(nest, str):
        return Structure(field=field_index[nest])
    if isinstance(nest, dict):
        parts = {key: structure_message(part, field_index) for key, part in nest.items()}
        return Structure(dict=Structure.Dict(parts=parts))
    return Structure(tuple=Structure.Tuple(parts=[structure_message(part, field_index) for part in nest]))


def array_from_message(message) -> np.ndarray:
    """A read-only view of the data of an Array message. Raises ValueError where dtype, shape and data do not fit."""
    dtype, shape = little_endian(message.dtype), tuple(message.shape)
    if any(size < 0 for size in shape) or len(message.data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(message.data)} bytes came for an array {message.dtype} {list(shape)}")
    return np.frombuffer(message.data, dtype).reshape(shape)


def nest_from_message(message) -> object:
    """What an Array message holds: a read-only array, or a nest of them in tuples and dicts. Raises ValueError where
    the parts do not fit together."""
    if not message.HasField("structure"):
        return array_from_message(message)
    return _nest(message.structure, [array_from_message(part) for part in message.parts])


def _nest(structure, leaves: list[np.ndarray]) -> object:
    kind = structure.WhichOneof("kind")
    if kind == "tuple":
        return tuple(_nest(part, leaves) for part in structure.tuple.parts)
    if kind == "dict":
        parts = structure.dict.parts
        return {key: _nest(parts[key], leaves) for key in sorted(parts)}
    if kind is None or structure.field >= len(leaves):
        raise ValueError(f"a part of a nest is none of its {len(leaves)} arrays")
    return leaves[structure.field]


def is_stack(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a field is a stack of frames, newest last: a deflated row may have its newest one alone
    (csrc/rpcenv.proto)."""
    return dtype == "uint8" and len(shape) == 3 and 2 <= shape[0] <= MAX_STACK and math.prod(shape) > 0


def readable(text: str, limit: int = MAX_TEXT) -> str:
    """Text from another host, safe to show: the last `limit` characters, without any that a terminal obeys."""
    return "".join(x if x.isprintable() or x in "\n\t" else "?" for x in text[-limit:])


def little_endian(dtype) -> np.dtype:
    """The dtype (or its name) as it lies on the wire. Raises InputError for one that the protocol does not have."""
    name = dtype.name if isinstance(dtype, np.dtype) else dtype
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not one that can be sent: {', '.join(DTYPES)}")
    return np.dtype(name).newbyteorder("<")


def space_to_json(space: spaces.Space) -> str:
    """Box, Discrete, MultiDiscrete, MultiBinary, and Tuple and Dict of these, as JSON that `space_from_json` reads.
    Raises InputError if the space is or holds another one."""
    return json.dumps(_describe(space), allow_nan=False)


def space_from_json(text: str) -> spaces.Space:
    """The space that `space_to_json` was given; a Dict keeps its order. InputError if the text describes none."""
    try:
        description = json.loads(text)
        if (count := _count_numbers(description)) > MAX_NUMBERS:
            raise ValueError(f"its Boxes have {count} numbers, at most {MAX_NUMBERS} are taken")
        return _build(description)
    except Exception as error:  # of many types: json's, numpy's and gymnasium's
        shown = text if len(text) < 200 else f"{text[:200]}…"  # repr() escapes what a terminal obeys
        raise InputError(f"no space is described by {shown!r} ({type(error).__name__}: {error})") from error


def _describe(space: spaces.Space) -> dict:
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete)):
        dtype = little_endian(np.dtype(space.dtype)).name
    if isinstance(space, spaces.Box):
        low, high = _bounds_to_json(space.low), _bounds_to_json(space.high)
        return {"type": "Box", "shape": list(space.shape), "dtype": dtype, "low": low, "high": high}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": dtype}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": dtype}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [_describe(part) for part in space]}
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": [[str(key), _describe(part)] for key, part in space.items()]}
    raise InputError(
        f"space {space} cannot be sent to a learner; those that can are Box, Discrete, MultiDiscrete, MultiBinary, and "
        "Tuple and Dict of these: wrap the environment so that its spaces are of them"
    )


def _count_numbers(description: dict) -> int:
    """Numbers of all Boxes in a space."""
    if description["type"] == "Box":
        return math.prod(abs(int(size)) for size in description["shape"])
    parts = description["spaces"] if description["type"] in ("Tuple", "Dict") else []
    return sum(_count_numbers(part if description["type"] == "Tuple" else part[1]) for part in parts)


def _build(description: dict) -> spaces.Space:
    kind = description["type"]
    if kind in ("Box", "Discrete", "MultiDiscrete"):
        dtype = np.dtype(little_endian(description["dtype"]).name)
    if kind == "Box":
        shape = tuple(description["shape"])
        bounds = (np.array(description[name], dtype) for name in ("low", "high"))  # numpy reads "inf"
        low, high = (bound.reshape(shape) if bound.ndim else np.full(shape, bound) for bound in bounds)
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        extra = {} if dtype == np.int64 else {"dtype": dtype.type}  # gymnasium 1.1 knows no other
        return spaces.Discrete(description["n"], start=description["start"], **extra)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(description["nvec"], dtype.type, start=description["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(description["n"])
    if kind == "Tuple":
        return spaces.Tuple([_build(part) for part in description["spaces"]])
    if kind == "Dict":
        return spaces.Dict([(key, _build(part)) for key, part in description["spaces"]])
    raise ValueError(f"{kind!r} is no type of a space")


def _bounds_to_json(bounds: np.ndarray):
    """One number where all are equal, as they are for images, else a flat list; infinity, unknown to JSON, as a str."""
    numbers = [number if math.isfinite(number) else str(number) for number in bounds.ravel().tolist()]
    return numbers[0] if len(set(numbers)) == 1 else numbers
