"""What runs in the processes of ``fliers``; it is imported before they are forked."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import django
from django.conf import settings

if not settings.configured:
    settings.configure(
        SECRET_KEY="not a secret: only tests use it",
        INSTALLED_APPS=["singleflight_django"],
        DATABASES={},
        CACHES={"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
    )
    django.setup()

from django.core.cache import close_caches
from django.test.utils import override_settings

from singleflight_django import signals, tier
from singleflight_django.functions import SingleFlight
from singleflight_django.waiting import clock
from tests.settings import SOCKET_TIMEOUT, django_redis

PATIENCE = 20.0


class Child:
    def __init__(self, pipe: Connection, options: dict[str, Any]) -> None:
        self.pipe, self.lock = pipe, threading.Lock()
        self.flights = SingleFlight("fliers", **options)
        self.gate = threading.Event()
        self.runs = 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.tasks: list[Any] = []

    def tell(self, kind: str, value: Any = None) -> None:
        with self.lock:
            self.pipe.send((kind, os.getpid(), clock(), value))

    def call(self, work: str, key: str, count: int, how: str) -> None:
        if how == "task":
            for _ in range(count):
                coroutine = self.task(work, key)
                self.tasks.append(asyncio.run_coroutine_threadsafe(coroutine, self.loop))
            return
        for _ in range(count):
            threading.Thread(target=self.thread, args=(work, key), daemon=True).start()

    def thread(self, work: str, key: str) -> None:
        try:
            answer = self.flights.run(key, self.work, work)
        except BaseException as error:
            answer = type(error).__name__
        finally:
            close_caches()
        self.tell("answer", answer)

    async def task(self, work: str, key: str) -> None:
        try:
            answer = await self.flights.arun(key, asyncio.to_thread, self.work, work)
        except BaseException as error:
            answer = type(error).__name__
        self.tell("answer", answer)

    def work(self, kind: str) -> str:
        """Gate, gate then …, instant, raise, exit, interrupt, die, or how many ms it takes."""
        self.runs += 1
        answer = f"{os.getpid()}-{self.runs}"
        self.tell("executing", answer)
        if kind.startswith("gate"):
            assert self.gate.wait(PATIENCE)
            kind = kind.removeprefix("gate then ")
        if kind == "gate":
            pass
        elif kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in ERRORS:
            raise ERRORS[kind](kind)
        elif kind != "instant":
            time.sleep(int(kind) / 1000)
        self.tell("executed", answer)
        return answer

    def open(self) -> None:
        self.gate.set()

    def close(self) -> None:
        self.gate.clear()

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def state(self) -> None:
        flights = list(tier._flights.values())
        passengers = sum(len(flight._passengers) for flight in flights)
        known = sum(flight.flight != 0 for flight in flights)
        self.tell("state", {"flights": len(flights), "known": known, "passengers": passengers})


ERRORS = {"raise": RuntimeError, "exit": SystemExit, "interrupt": KeyboardInterrupt}


def main(pipe: Connection, url: str, store: str | None, options: dict[str, Any]) -> None:
    caches = {
        "default": django_redis(url, SOCKET_TIMEOUT=options.pop("socket_timeout", SOCKET_TIMEOUT))
    }
    with override_settings(CACHES=caches, SINGLEFLIGHT_STORE=store):
        child = Child(pipe, options)
        for name in ("flight_taken_over", "flight_failed", "lease_lost", "unprotected_run"):
            getattr(signals, name).connect(
                lambda name=name, **kwargs: child.tell("event", name), weak=False
            )
        child.tell("ready")
        for name, args in iter(pipe.recv, None):
            getattr(child, name)(*args)
        os._exit(0)
