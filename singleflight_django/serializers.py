"""Values of functions as records: JSON, pickle by explicit choice, or a model's primary key.

A codec's encode() raises UnshareableResultError for a value that would not come back equal;
decode() and adecode() return UNREADABLE, after a log line, for a record that they can't read.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, Final, Protocol

from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db.models import Model
from django.utils.connection import ConnectionDoesNotExist

from singleflight_django.exceptions import UnshareableResultError
from singleflight_django.records import JSON, MODEL, PICKLE, UNREADABLE, ignore, seal, unseal


class Codec(Protocol):
    """How values become records and records values."""

    def encode(self, value: Any) -> bytes:
        """Return the record of ``value``; raise UnshareableResultError if it can't be one."""

    def decode(self, data: object) -> Any:
        """Return the value, or UNREADABLE."""

    async def adecode(self, data: object) -> Any:
        """See decode()."""


def codec(serializer: str = "json", returns: type[Model] | None = None) -> Codec:
    """Return the codec for the options ``serializer`` and ``returns``; raise if they can't work."""
    if serializer not in _CODECS:
        raise ValueError(f'serializer must be "json" or "pickle", not {serializer!r}.')
    if returns is None:
        return _CODECS[serializer]()
    if not (isinstance(returns, type) and issubclass(returns, Model)) or returns._meta.abstract:
        raise TypeError(f"returns must be a model class that has a table, not {returns!r}.")
    if serializer != "json":
        raise ValueError("returns=Model sends the primary key: it needs no serializer.")
    return ModelCodec(returns)


def to_json(value: object) -> bytes:
    """Return JSON text that gives an equal value back; raise UnshareableResultError without one."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        same = bool(json.loads(text) == value)
    except Exception as error:
        raise UnshareableResultError(f"It can't be written as JSON: {error}") from error
    if not same:
        raise UnshareableResultError(
            "Read back from JSON it would not be equal: a tuple becomes a list, a key of a dict a "
            "str. Return what JSON knows."
        )
    return text.encode()


class JSONCodec:
    """Values that JSON gives back equal. The default."""

    def encode(self, value: Any) -> bytes:
        """See Codec."""
        return seal(JSON, {}, to_json(value))

    def decode(self, data: object) -> Any:
        """See Codec."""
        record = unseal(data, JSON)
        return UNREADABLE if record is None else json.loads(record.body.decode())

    async def adecode(self, data: object) -> Any:
        """See Codec."""
        return self.decode(data)


class PickleCodec:
    """Whatever pickle can carry. Only records with this site's seal are opened."""

    def encode(self, value: Any) -> bytes:
        """See Codec."""
        try:
            body = pickle.dumps(value)
        except Exception as error:
            raise UnshareableResultError(f"It can't be pickled: {error}") from error
        return seal(PICKLE, {}, body)

    def decode(self, data: object) -> Any:
        """See Codec."""
        record = unseal(data, PICKLE)
        if record is None:
            return UNREADABLE
        try:
            return pickle.loads(record.body)  # noqa: S301 - sealed with the site's own key
        except Exception as error:
            # A class may have moved or changed between two versions of the site.
            ignore(f"{type(error).__name__}: {error}")
            return UNREADABLE

    async def adecode(self, data: object) -> Any:
        """See Codec."""
        return self.decode(data)


class ModelCodec:
    """Instances of one model, or None. Each follower reads the row itself."""

    def __init__(self, model: type[Model]) -> None:
        self.model = model

    def encode(self, value: Any) -> bytes:
        """See Codec."""
        label = self.model._meta.label
        if value is None:
            return seal(MODEL, {"model": label, "pk": None, "using": None}, b"")
        # An instance of a child's table would come back as its parent, which is not equal to it.
        meta = getattr(type(value), "_meta", None)
        if getattr(meta, "concrete_model", None) is not self.model._meta.concrete_model:
            raise UnshareableResultError(f"It is {type(value).__name__}, and returns={label}.")
        if value.pk is None or value._state.adding:
            raise UnshareableResultError(f"It is a {label} that has not been saved.")
        pk = value._meta.pk.value_to_string(value)
        return seal(MODEL, {"model": label, "pk": pk, "using": value._state.db}, b"")

    def decode(self, data: object) -> Any:
        """See Codec."""
        head = self._head(data)
        if head is None or head["pk"] is None:
            return UNREADABLE if head is None else None
        try:
            return self._row(head).get()
        except _GONE as error:
            return _gone(head, error)

    async def adecode(self, data: object) -> Any:
        """See decode()."""
        head = self._head(data)
        if head is None or head["pk"] is None:
            return UNREADABLE if head is None else None
        try:
            return await self._row(head).aget()
        except _GONE as error:
            return _gone(head, error)

    def _head(self, data: object) -> dict[str, Any] | None:
        record = unseal(data, MODEL)
        if record is None:
            return None
        if record.head["model"] != self.model._meta.label:
            ignore(f"it holds a {record.head['model']}, not a {self.model._meta.label}")
            return None
        return record.head

    def _row(self, head: dict[str, Any]) -> Any:
        pk = self.model._meta.pk.to_python(head["pk"])
        return self.model._default_manager.using(head["using"]).filter(pk=pk)


# A database that doesn't answer is not among them: that is the follower's own failure.
_GONE: Final = (ObjectDoesNotExist, ConnectionDoesNotExist, ValidationError, ValueError)


def _gone(head: dict[str, Any], error: Exception) -> Any:
    ignore(f"{head['model']} with the primary key {head['pk']}: {type(error).__name__}")
    return UNREADABLE


_CODECS: Final[dict[str, type[JSONCodec | PickleCodec]]] = {
    "json": JSONCodec,
    "pickle": PickleCodec,
}
