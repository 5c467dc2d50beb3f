"""HTTPS by certificate files."""

from __future__ import annotations

import ssl

from vlm.config import ServeConfig, SettingsError


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """None for plain HTTP. Raises SettingsError."""
    if not config.tls_certfile:
        if config.tls_keyfile:
            raise SettingsError("tls_keyfile needs tls_certfile, the certificate of that key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServeConfig) -> None:
    """Raises SettingsError."""
    try:
        context.load_cert_chain(config.tls_certfile, config.tls_keyfile or None, _no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise SettingsError(f"tls_certfile and tls_keyfile can't be used: {reason}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
