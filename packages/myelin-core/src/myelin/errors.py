"""The errors a person may meet: what happened, how to mend it, and the exit code that goes with it."""

from __future__ import annotations


class MyelinError(Exception):
    """Something went wrong that a person can understand and mend.

    Args:
        message: What happened, one line, without a full stop's worth of jargon.
        hint: How to mend it, one line; empty only where there is nothing to do.
        reason: A short stable label (``kebab-case``) for spans, JSON and tests.
    """

    exit_code = 1
    default_reason = "failed"

    def __init__(self, message: str, hint: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reason = reason or self.default_reason


class UsageError(MyelinError):
    """The words on the command line, or of a request, were wrong."""

    exit_code = 2
    default_reason = "usage"


class ConfigError(UsageError):
    """A configuration value is unknown, malformed, or contradicts another."""

    default_reason = "config"


class ModelError(MyelinError):
    """The model file is missing, damaged, malicious, or of a kind that Myelin does not serve."""

    default_reason = "model"


class PlanError(UsageError):
    """The model cannot be split the way it was asked for."""

    default_reason = "plan"


class PluginError(MyelinError):
    """A plugin is missing, conflicting, incompatible, broken, invalid, disabled, or not ready yet."""

    default_reason = "plugin"


class ProviderError(MyelinError):
    """A provider could not start, list or release a node."""

    default_reason = "provider"


class TransportError(MyelinError):
    """A stream could not be opened, or broke."""

    default_reason = "transport"


class WireError(TransportError):
    """Bytes from a peer are not a message that we accept."""

    default_reason = "wire"


class NodeError(MyelinError):
    """A node failed, or was lost."""

    default_reason = "node"


class EngineError(MyelinError):
    """An engine could not load its stage, or compute a step."""

    default_reason = "engine"


class RequestError(UsageError):
    """One request cannot be served (a prompt longer than the context, a bad count); the pipeline itself is well."""

    default_reason = "request"


class StreamClosed(TransportError):
    """The peer closed the stream in good order."""

    default_reason = "stream-closed"
