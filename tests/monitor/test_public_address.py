"""What events tell of an address holds no secret of it."""

from __future__ import annotations

import pytest

from myxa.actors.sinks.public_address import public_address, public_errors


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("", ""),
        ("mlruns", "mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
        ("http://[::1]:4318/v1", "http://[::1]:4318/v1"),
        ("https://me:s3cret@host:5000/path?token=s3cret#s3cret", "https://host:5000/path"),
        ("https://s3cret@host", "https://host"),
        ("postgresql://me:s3cret@host/db?password=s3cret", "postgresql://host/db"),
        ("http://host/?mail=s3cret@x", "http://..."),
        ("http://me:s3cret/more@host/", "http://..."),
        ("http://me:s3cret?more@host/", "http://..."),
        ("http://me:s3cret#more@host/", "http://..."),
        ("http://me:s3@cret@host/", "http://..."),
        ("http://[s3cret", "http://..."),
    ],
)
def test_only_what_is_surely_no_secret_is_shown(address: str, shown: str) -> None:
    assert public_address(address) == shown


def test_errors_that_quote_the_address_are_told_without_it() -> None:
    address = "http://me:s3cret@host:5000/x?token=t0ken"
    with (
        pytest.raises(OSError, match="ValueError: http://host:5000/x does not answer") as caught,
        public_errors(address),
    ):
        raise ValueError(f"{address} does not answer, nor does //me:s3cret@host with t0ken")
    assert not any(word in str(caught.value) for word in ("s3cret", "t0ken"))
    assert caught.value.__suppress_context__
    with pytest.raises(KeyError, match="run"), public_errors(address):
        raise KeyError("run")
