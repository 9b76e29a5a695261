"""Settings for the publication of KV events, from the JSON value of `--kv-events-config`."""

from __future__ import annotations

import msgspec

from splitserve.core.errors import OptionError


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publication of the content of the prefix caches: the value of `--kv-events-config`, a JSON object."""

    # "null": no events; "zmq"; `observe/events/publisher.py`.
    publisher: str = "null"
    # The data parallel rank is added to the port of each; port 0: any free one. The publisher connects to a TCP
    # endpoint without a wildcard, and listens at any other. No replay endpoint: no replay.
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    # Batches kept for replay, messages queued by ZMQ for a slow subscriber, batches that wait for the publisher's
    # thread.
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    # Events as arrays, the format before 2026.
    as_arrays: bool = False
    # Replayed batches are [topic, number, payload]; else [number, payload].
    replay_topic: bool = True

    @classmethod
    def from_cli(cls, text: str, option: str) -> KVEventsConfig:
        """Return the settings of a JSON object. Raises OptionError."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise OptionError(option, f"{text!r}: {error}") from error
        if min(config.buffer_steps, config.hwm, config.max_queue_size) < 1:
            raise OptionError(option, f"{text!r}: buffer_steps, hwm and max_queue_size must be at least 1")
        return config
