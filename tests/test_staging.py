"""The names of the files between a server and the extraction."""

from eagle3.capture.staging import request_id, tokens_of


def test_request_id_announces_the_tokens() -> None:
    assert tokens_of(request_id(123, "a1-b2")) == 123
    for foreign in ("HEALTH_CHECK_1", "eagle3-0-x", "eagle3-5-../x", "eagle3-5-", "a-eagle3-5-x"):
        assert tokens_of(foreign) is None, foreign
