"""Bodies the router cannot parse are the client's fault, whatever is wrong with them."""

import pytest

from splitserve.errors import InvalidRequestError
from splitserve.router.balancer import parse_body


@pytest.mark.parametrize("raw", [b"", b'{"text": ', b"[1]", b'"text"', b'{"a":' + b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(raw):
    with pytest.raises(InvalidRequestError, match="JSON"):
        parse_body(raw)
