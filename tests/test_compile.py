"GeM through the real compiler, forward and backward; the notebook only traces."
import math, shutil

import pytest, torch
from multigrain.gem import GeM, gem, gem_many

found = shutil.which('g++') or shutil.which('clang++')
compiler = pytest.mark.skipif(not found, reason='torch.compile needs a C++ compiler, and there is none here')

@compiler
@pytest.mark.parametrize('p, learn', [(3., False), (2.5, False), (math.inf, False), (10., True)])
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_compiled_layer(p, learn, layout):
    pool = GeM(p, learn=learn)
    x = torch.relu(torch.randn(2, 32, 7, 7, generator=torch.Generator().manual_seed(0)))
    x[0, 0] = 0
    x = x.to(memory_format=layout)
    results = []
    for f in (pool, torch.compile(pool, fullgraph=True)):
        xg = x.clone().requires_grad_()
        pool.zero_grad()
        y = f(xg)
        y.square().sum().backward()
        results.append([y.detach(), xg.grad] + [q.grad.clone() for q in pool.parameters()])
    for a, b in zip(*results): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

@compiler
def test_compiled_sweep():
    x, ps = torch.rand(2, 16, 9, 5, generator=torch.Generator().manual_seed(0)), [1, 2, 3.5, 10, math.inf]
    sweep = torch.compile(lambda x: gem_many(x, ps), fullgraph=True)
    torch.testing.assert_close(sweep(x), torch.stack([gem(x, p) for p in ps]), rtol=1e-4, atol=1e-6)

def test_new_sizes_do_not_compile_again_and_again():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pool = torch.compile(GeM(), backend='eager', fullgraph=True)
    for n, side in ((2, 7), (3, 8), (4, 9), (5, 11), (6, 13)):
        assert pool(torch.rand(n, 4, side, side + 1)).shape == (n, 4)
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] <= 3 # from the second size on, sizes are symbols
