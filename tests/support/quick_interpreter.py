"""Makes Triton's CPU interpreter several times faster, without changing what it computes.

Triton 3.6.0 spends most of an interpreted kernel on things it has already worked out: every call of a device function
searches the language for functions to patch, every value describes its shape anew, and names types by formatting them.
`quicken` remembers them, and makes each type of a block once. Triton also computes whether integers overflow, for an
assertion that only a debug build makes, and asks at length what two operands of one type have in common. A reduction by
"or" or "xor" calls a function for every element; numpy gives the same bits at once. Nothing else here touches a number.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core, standard
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_INT32 = range(-(1 << 31), 1 << 31)


def quicken() -> None:
    """Patch the interpreter of this process."""
    interpreter._get_np_dtype = _NumpyTypes(interpreter._get_np_dtype)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _PatchedLanguage(interpreter._patch_lang)
    core.tuple.__init__ = _tuple_init
    core.tuple.type = property(_tuple_type, _set_tuple_type)
    core.block_type.__new__ = _BlockTypes(core.block_type)
    core.block_type.__init__ = _block_type_init
    core.tensor.__init__ = _tensor_init
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    core.dtype.__eq__ = _equal(core.dtype.__eq__)
    TritonSemantic.cast = _cast(TritonSemantic.cast)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_type_checking_impl = _operands(TritonSemantic.binary_op_type_checking_impl)
    interpreter.TensorHandle.__init__ = _handle_init
    interpreter.InterpreterBuilder.binary_op = _binary_op
    interpreter.ReduceOps.generic_reduce = _reduce(interpreter.ReduceOps.generic_reduce)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class _NumpyTypes:
    """NumPy's types for Triton's, each looked up once."""

    def __init__(self, plain: Any) -> None:
        self._of_scalar = functools.cache(plain)

    def __call__(self, kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else self._of_scalar(scalar)


class _PatchedLanguage:
    """Patches what functions see of the language once a launch. Triton does so again in every call of a function within
    an interpreted one, and never restores what it patched there."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._patched: set[Any] = set()
        self._seen_by = functools.cache(_languages)

    def __call__(self, function: Any) -> Any:
        seen = self._seen_by(function)
        if self._patched and self._patched >= seen:
            return None
        outermost = not self._patched
        scope = self._plain(function)
        self._patched |= seen
        if outermost:
            restore = scope.restore

            def end() -> None:
                self._patched.clear()
                restore()

            scope.restore = end
        return scope


def _languages(function: Any) -> frozenset[Any]:
    return frozenset(value for value in function.__globals__.values() if value is tl or value is core)


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(package) if core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    semantic = TritonSemantic(builder)
    for name in _builtins(package):
        member = getattr(package, name)
        if core.is_builtin(member):
            scope.set_attr(package, name, _given(semantic, member))


def _given(semantic: Any, function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    return call


def _tuple_init(self: Any, values: Any, type: Any = None) -> None:
    """Make a tuple as Triton does, but work out the type of the values when it is asked for."""
    self.values = list(values)
    self._type = None if type is None else type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def _tuple_type(self: Any) -> Any:
    if self._type is None:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


def _set_tuple_type(self: Any, type: Any) -> None:
    self._type = type


@functools.cache
def _described(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """A block's shape as its type keeps it, number of elements, name."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    kept = core.tuple(shape)
    return kept, core.validate_block_shape(kept), str(kept)


class _BlockTypes:
    """Block types, each made once: nobody changes one."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._made: dict[tuple[int, tuple[int, ...]], Any] = {}  # by the element type's id, which a made one keeps

    def __call__(self, kind: Any, element_ty: Any, shape: Any) -> Any:
        sizes = shape.values if type(shape) is core.tuple else shape
        key = id(element_ty), tuple([s if type(s) is int else core._unwrap_if_constexpr(s) for s in sizes])
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = object.__new__(self._kind)
            made.element_ty = element_ty
            made.shape, made.numel, text = _described(key[1])
            made.name = f"<{text}, {element_ty}>"
        return made


def _block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
    """See `_BlockTypes`."""


@functools.cache
def _tensor_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's shape and number of elements as its attributes keep them."""
    return core.tuple([core.constexpr(s) for s in shape]), core.constexpr(math.prod(shape))


def _tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _tensor_shape(tuple(type.shape.values) if type.is_block() else ())


def _too_wide(data: Any, dtype: Any) -> bool:
    """Whether numbers have more bits than their type."""
    return data.itemsize > 1 and type(dtype) is not tl.pointer_type and data.itemsize * 8 > dtype.primitive_bitwidth


def _handle_init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if _too_wide(data, dtype):
        raise ValueError(f"{data.itemsize * 8} bits exceed those of {dtype}")


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
    if _too_wide(output, dtype):
        output = output.astype(interpreter._get_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


def _unwrapped(plain: Any) -> Any:
    several = (list, tuple, core.tuple)

    def unwrap(o: Any) -> Any:
        if isinstance(o, core.constexpr):
            return o.value
        return plain(o) if isinstance(o, several) else o

    return unwrap


def _equal(plain: Any) -> Any:
    def equal(self: Any, other: Any) -> bool:
        return self is other or plain(self, other)

    return equal


def _cast(plain: Any) -> Any:
    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        return input if input.dtype is dst_ty.scalar else plain(self, input, dst_ty, fp_downcast_rounding)

    return cast


def _broadcast(plain: Any) -> Any:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        block = left.is_block()
        if block is right.is_block() and (not block or left.shape is right.shape):  # see `_described`
            return lhs, rhs
        return plain(self, lhs, rhs)

    return broadcast


def _operands(plain: Any) -> Any:
    """Operands that are tensors of one type, or a tensor and a small number, which takes the tensor's type."""
    integers = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    kept, takes_int, takes_float = {*integers, "fp32", "fp64"}, {"int32", "int64", "fp32", "fp64"}, {"fp32", "fp64"}

    def like(self: Any, number: Any, tensor: Any) -> Any:
        """The number as a value of the tensor's type, or None where that takes a closer look."""
        taken = takes_int if type(number) is int and number in _INT32 else takes_float if type(number) is float else ()
        return self.scalar_constant(number, dtype=tensor.dtype) if tensor.dtype.name in taken else None

    def operands(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: Any = False, allow_rhs_ptr: Any = False,
        arithmetic_check: Any = True, div_or_mod: Any = False,
    ) -> Any:  # fmt: skip
        left, right = type(lhs) is core.tensor, type(rhs) is core.tensor
        if left and right:
            if lhs.dtype is rhs.dtype and lhs.dtype.name in kept:
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and left:
            if (value := like(self, rhs, lhs)) is not None:
                return self.broadcast_impl_value(lhs, value)
        elif arithmetic_check and right and (value := like(self, lhs, rhs)) is not None:
            return self.broadcast_impl_value(value, rhs)
        return plain(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return operands


def _reduce(plain: Any) -> Any:
    """Reduce integers at once by a bitwise function, whose result does not depend on the order."""
    at_once = ((standard._or_combine, np.bitwise_or), (standard._xor_combine, np.bitwise_xor))

    def generic_reduce(self: Any, input: Any) -> Any:
        function = next((function for combine, function in at_once if self.combine_fn is combine), None)
        if function is None or len(input) != 1 or input[0].handle.data.dtype.kind not in "iu":
            return plain(self, input)
        found = function.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(found, input[0].dtype)]

    return generic_reduce
