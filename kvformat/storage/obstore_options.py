"""fsspec's storage options as obstore's configuration, or why there is none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

__all__ = ["Inexpressible", "Target", "target_of"]

_CONNECT_TIMEOUT_S = 10.0
# What steers fsspec's own caches and pools, and has no bearing here.
_IGNORED = frozenset(
    {
        "asynchronous",
        "cache_regions",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "listings_expiry_time",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
        "use_ssl",
    }
)
_IGNORED_CONFIG = frozenset({"connect_timeout", "read_timeout", "retries", "max_pool_connections", "s3"})
_S3_KEYS = {
    "key": "access_key_id",
    "username": "access_key_id",
    "secret": "secret_access_key",
    "password": "secret_access_key",
    "token": "session_token",
}
_S3_CLIENT_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region_name": "region",
    "endpoint_url": "endpoint",
}
_AZURE_KEYS = {
    "account_name": "account_name",
    "account_key": "account_key",
    "sas_token": "sas_key",
    "tenant_id": "tenant_id",
    "client_id": "client_id",
    "client_secret": "client_secret",
}
# Where obstore finds credentials by itself. Profiles and their files are botocore's alone.
_S3_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_Environment = Mapping[str, str]


class Inexpressible(ValueError):  # noqa: N818 -- says what it is
    """obstore has no setting for an option, or would look for credentials elsewhere."""


class Target(NamedTuple):
    """Class of ``obstore.store``, bucket or container, prefix below it, and settings."""

    kind: str
    bucket: str
    prefix: str
    config: dict[str, Any]
    client_options: dict[str, Any]


def target_of(
    url: str, options: Mapping[str, Any], *, timeout_s: float, environment: _Environment | None = None
) -> Target:
    """What to give to obstore for a URL.

    Raises
    ------
    Inexpressible
        Where it must be left to fsspec.
    """
    scheme, _, rest = url.partition("://")  # by hand: for `urlsplit`, a name ends at #, and holds no tabs
    place, _, path = rest.partition("/")
    if "//" in f"/{path}":
        raise Inexpressible("names with empty parts")
    if any(character < " " or character == "\x7f" for character in path):
        raise Inexpressible("names with control characters")
    scheme, prefix = scheme.lower(), path.strip("/")
    given = {key: value for key, value in options.items() if value is not None and key not in _IGNORED}
    client: dict[str, Any] = {
        "timeout": f"{max(int(timeout_s * 1000), 1)}ms",
        "connect_timeout": f"{max(int(min(timeout_s, _CONNECT_TIMEOUT_S) * 1000), 1)}ms",
    }
    found = os.environ if environment is None else environment
    if scheme in ("s3", "s3a"):
        if options.get("use_ssl") is False and "endpoint_url" not in given:
            raise Inexpressible("use_ssl=False without an endpoint_url")
        return Target("S3Store", place, prefix, _s3(place, given, client, found), client)
    if scheme in ("gs", "gcs"):
        return Target("GCSStore", place, prefix, _gcs(given), client)
    if scheme in ("az", "abfs", "abfss"):
        container, _, host = place.partition("@")
        return Target("AzureStore", container, prefix, _azure(given, host, found), client)
    raise Inexpressible(f"no {scheme}://")


def _s3(bucket: str, given: dict[str, Any], client: dict[str, Any], environment: _Environment) -> dict[str, Any]:
    config: dict[str, Any] = {}
    inner = dict(given.pop("client_kwargs", {}))
    verify = inner.pop("verify", None)
    inner.pop("use_ssl", None)
    for source, names in ((inner, _S3_CLIENT_KEYS), (given, _S3_KEYS)):
        for key in names.keys() & source.keys():
            config[names[key]] = source.pop(key)
    if "endpoint_url" in given:
        config["endpoint"] = given.pop("endpoint_url")
    if given.pop("requester_pays", False):
        config["request_payer"] = True
    anonymous = bool(given.pop("anon", False))
    virtual, signed = _botocore_config(dict(given.pop("config_kwargs", {})))
    _none_left({**inner, **given})

    endpoint = config.get("endpoint") or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if not config.get("endpoint") and _is_elsewhere(endpoint, environment):
        raise Inexpressible("an endpoint of a configuration file")
    _certificates(verify, endpoint, client, environment)
    if not anonymous:
        _require_credentials(config, environment)
    # Said even where they are the defaults: obstore has environment variables for them, of which fsspec knows nothing.
    config["conditional_put"] = "etag"
    config["skip_signature"] = anonymous
    config["unsigned_payload"] = not signed
    config.setdefault("region", environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"))
    if not config["region"]:
        if not endpoint:
            raise Inexpressible("a bucket of an unknown region")
        config["region"] = "us-east-1"
    if endpoint:
        parts = urlsplit(endpoint)
        client["allow_http"] = parts.scheme == "http"
        config["endpoint"] = f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}" if virtual else endpoint
    config["virtual_hosted_style_request"] = virtual
    return config


def _certificates(verify: Any, endpoint: str | None, client: dict[str, Any], environment: _Environment) -> None:
    """Whether to check the server's certificate; by those of a file, only botocore does."""
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif verify not in (None, True):
        raise Inexpressible("certificates of a file")
    elif environment.get("AWS_CA_BUNDLE") and not (endpoint or "").startswith("http:"):
        raise Inexpressible("the certificates of AWS_CA_BUNDLE")


def _require_credentials(config: Mapping[str, Any], environment: _Environment) -> None:
    """That obstore will find the ones botocore would."""
    if "access_key_id" in config:
        if "session_token" not in config and environment.get("AWS_SESSION_TOKEN"):
            raise Inexpressible("keys to which the session token of the environment does not belong")
    elif not any(environment.get(name) for name in _S3_ENVIRONMENT):
        raise Inexpressible("credentials of a profile, or of this machine")
    elif environment.get("AWS_PROFILE"):
        raise Inexpressible("credentials of AWS_PROFILE")


def _is_elsewhere(endpoint: str | None, environment: _Environment) -> bool:
    """Whether botocore, which alone reads configuration files, may go to another endpoint than the environment's."""
    if environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return endpoint is not None
    if endpoint is not None:
        return False
    try:
        file = Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
        return "endpoint_url" in file.read_text("utf-8", "replace")
    except (OSError, RuntimeError):
        return False


def _botocore_config(config: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the bucket is named in the host, and whether payloads are part of signatures."""
    inner = dict(config.get("s3") or {})
    style = inner.pop("addressing_style", "auto")
    signed = inner.pop("payload_signing_enabled", None)
    _none_left({**inner, **{key: value for key, value in config.items() if key not in _IGNORED_CONFIG}})
    return style == "virtual", signed is not False


def _gcs(given: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    given.pop("project", None)  # matters to buckets, not to objects
    token = given.pop("token", None)
    if token == "anon":  # noqa: S105 -- gcsfs's word for no credentials
        config["skip_signature"] = True
    elif isinstance(token, str) and token.endswith(".json"):
        config["application_credentials"] = token
    elif token not in (None, "google_default"):
        raise Inexpressible("this kind of token")
    _none_left(given)
    return config


def _azure(given: dict[str, Any], host: str, environment: _Environment) -> dict[str, Any]:
    config: dict[str, Any] = {_AZURE_KEYS[key]: given.pop(key) for key in _AZURE_KEYS.keys() & given.keys()}
    if given.pop("anon", False):
        config["skip_signature"] = True
    _none_left(given)
    if host:
        account, _, domain = host.partition(".")
        if domain not in ("dfs.core.windows.net", "blob.core.windows.net"):
            raise Inexpressible(f"the host {host}")
        config["account_name"] = account
    config.setdefault("account_name", environment.get("AZURE_STORAGE_ACCOUNT_NAME"))
    if not config["account_name"]:
        raise Inexpressible("an account that is not named")
    if not config.keys() & {"account_key", "sas_key", "client_secret", "skip_signature"}:
        raise Inexpressible("credentials of this machine")
    return config


def _none_left(options: Mapping[str, Any]) -> None:
    left = [key for key, value in options.items() if value not in (None, {}, "")]
    if left:
        raise Inexpressible(", ".join(sorted(left)))
