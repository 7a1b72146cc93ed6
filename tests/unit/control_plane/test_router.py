"""Which replica takes a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane import router
from control_plane.request import Request, SamplingParams


@dataclass
class Replica:
    replica_id: str
    queued_tokens: int = 0
    num_live: int = 0
    is_doubtful: bool = False
    longest: int = 1000
    hits: dict[str, int] = field(default_factory=dict)

    def fits(self, num_total_tokens: int, num_sequences: int) -> bool:
        return num_total_tokens * num_sequences <= self.longest

    def num_hit_tokens(self, request: Request) -> int:
        return self.hits.get(request.req_id, 0)


def request(num_tokens: int = 100, total: int = 200, n: int = 1) -> Request:
    return Request(
        req_id="q",
        prompt_token_ids=[1] * num_tokens,
        sampling=SamplingParams(n=n),
        seed=0,
        max_total_tokens=total,
        arrival=0,
    )


def chosen(*replicas: Replica, of: Request | None = None) -> str | None:
    replica = router.choose(of or request(), replicas)
    return None if replica is None else replica.replica_id


def test_a_cached_prefix_attracts() -> None:
    assert chosen(Replica("a"), Replica("b", hits={"q": 64})) == "b"


def test_queued_work_outweighs_a_smaller_prefix() -> None:
    assert chosen(Replica("a"), Replica("b", hits={"q": 64}, queued_tokens=65)) == "a"


def test_equal_costs_go_to_the_less_loaded_then_to_the_first_by_id() -> None:
    assert chosen(Replica("a", num_live=3), Replica("b", num_live=2)) == "b"
    assert chosen(Replica("b"), Replica("a")) == "a"


def test_a_doubtful_replica_gets_what_no_other_can_take() -> None:
    sick = Replica("a", hits={"q": 96}, is_doubtful=True)
    assert chosen(sick, Replica("b", queued_tokens=5000)) == "b"
    assert chosen(sick, Replica("b", longest=10)) == "a"
    assert chosen(sick, Replica("b", is_doubtful=True)) == "a"


def test_only_replicas_where_it_fits_are_candidates() -> None:
    assert chosen(Replica("a", longest=199, hits={"q": 99}), Replica("b")) == "b"
    assert chosen(Replica("a", longest=199)) is None
    assert chosen(Replica("a", longest=399), of=request(n=2)) is None
    assert chosen() is None


def test_the_longest_fit_is_the_largest_of_all_replicas_up_to_the_limit() -> None:
    replicas = [Replica("a", longest=70), Replica("b", longest=130), Replica("c", longest=10)]
    assert router.longest_fit(replicas, 1, limit=1000) == 130
    assert router.longest_fit(replicas, 2, limit=1000) == 65
    assert router.longest_fit(replicas, 1, limit=100) == 100
    assert router.longest_fit([], 1, limit=100) == 0


def open_request(num_tokens: int = 100, limit: int = 1000) -> Request:
    return Request(
        req_id="q",
        prompt_token_ids=[1] * num_tokens,
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=limit,
        is_open_ended=True,
        arrival=0,
    )


def test_an_open_output_is_as_long_as_fits_and_longer_again_where_more_does() -> None:
    open_ended = open_request()
    for longest in (300, 200, 700):
        router.resolve_length(
            open_ended, [Replica("a", longest=150), Replica("b", longest=longest)]
        )
        assert open_ended.max_total_tokens == longest
    router.resolve_length(open_ended, [Replica("a", longest=5000)])
    assert open_ended.max_total_tokens == 1000


def test_an_open_output_is_not_cut_where_what_is_known_does_not_fit() -> None:
    open_ended = open_request()
    for replicas in ([], [Replica("a", longest=100)]):
        router.resolve_length(open_ended, replicas)
        assert open_ended.max_total_tokens == 1000


def test_an_output_that_the_client_limited_stays_as_it_is() -> None:
    limited = request(total=200)
    router.resolve_length(limited, [Replica("a", longest=150)])
    assert limited.max_total_tokens == 200
