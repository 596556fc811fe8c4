"Properties of rankings and scores that must hold for any input: order, chunks, threads, duplicates."
import numpy as np, torch
from hypothesis import given, settings, strategies as st
from multigrain.evaluate import average_precision, mean_average_precision, nearest_neighbours, positive_ranks, ukb_score

few = settings(max_examples=60, deadline=None)
ranks = st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=20)

@st.composite
def searches(draw):
    "Small vectors of small whole numbers, so that ties and duplicates are common; some rows of the database are right."
    n, d = draw(st.integers(2, 40)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.integers(-1, 2, (n, d)).astype(np.float32)
    return x, [rng.permutation(n)[:rng.integers(1, n + 1)] for _ in range(n)], rng

@few
@given(ranks, st.integers(0, 5))
def test_average_precision_is_ordered(r, lost):
    n = len(r) + lost
    trapezoid, step = average_precision(r, n), average_precision(r, n, 'step')
    assert 0 <= trapezoid <= step <= len(r)/n
    better = [i for i in range(max(r)) if i not in r]
    if better: assert average_precision(sorted(r)[:-1] + better[-1:], n) >= trapezoid  # the last one moves up

@few
@given(searches())
def test_ranks_do_not_depend_on_chunks_or_on_the_order_of_the_database(search):
    x, positives, rng = search
    expected = positive_ranks(x, x, positives)
    for chunk in (1, 3):
        for a, b in zip(positive_ranks(x, x, positives, chunk=chunk), expected): np.testing.assert_array_equal(a, b)
    order = rng.permutation(len(x))
    moved = positive_ranks(x, x[order], [np.argsort(order)[p] for p in positives])
    for a, b, p in zip(moved, expected, positives):
        np.testing.assert_array_equal(np.sort(a), np.sort(b))
        assert len(set(b)) == len(p) and b.max() < len(x)

@few
@given(searches())
def test_a_duplicate_of_a_right_answer_costs_one_rank(search):
    x, positives, _ = search
    first = [p[:1] for p in positives]
    before = positive_ranks(x[:1], x, first[:1])
    after = positive_ranks(x[:1], np.concatenate([x, x[first[0]]]), first[:1])
    assert after[0][0] == before[0][0] + 1

@few
@given(searches())
def test_neighbours_are_sorted_and_ties_go_by_row(search):
    x = search[0]
    rows, cosines = nearest_neighbours(x, x, len(x))
    for r, c in zip(rows, cosines):
        assert sorted(r) == list(range(len(x)))
        assert all(a > b or (a == b and i < j) for a, b, i, j in zip(c, c[1:], r, r[1:]))

def test_threads_and_precision_of_storage_change_nothing():
    x = torch.randn(1200, 512, generator=torch.Generator().manual_seed(0)).half()
    groups, threads, seen = np.arange(1200)//4, torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            seen += [mean_average_precision(e, groups).per_query for e in (x, x.float(), x.numpy(), x.double())]
    finally: torch.set_num_threads(threads)
    for s in seen[1:]: np.testing.assert_array_equal(s, seen[0])

def test_memory_map_is_read_in_place(tmp_path):
    x = np.random.default_rng(0).standard_normal((400, 32)).astype(np.float16)
    np.save(tmp_path/'x.npy', x)
    mapped, groups = np.load(tmp_path/'x.npy', mmap_mode='r'), np.repeat(np.arange(100), 4)
    assert ukb_score(mapped, groups).to_dict() == ukb_score(x, groups).to_dict()
    assert (mapped == x).all()
