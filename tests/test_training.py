"Training as people run it: real processes, killed at bad moments, several of them, and on a full disk."
import json, os, signal, subprocess, sys, time
from pathlib import Path
import pytest
from safetensors.torch import load_file
from multigrain.datasets import SMOKE_WORLD
from multigrain.runs import Run
from multigrain.world import make_world

TRAIN = '''
import os, resource, sys
import multigrain.launch, multigrain.runs, multigrain.training, torch
torch.set_num_threads(1)
where, n, limit, *words = sys.argv[1:]
if int(limit): resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit),)*2)
calls = 0
def deadly(f):
    def g(*a, **k):
        global calls
        calls += 1
        if calls == int(n): os.kill(os.getpid(), 9)
        return f(*a, **k)
    return g
def kill_at(owner, name): setattr(owner, name, deadly(getattr(owner, name)))
if where == 'update': kill_at(torch.optim.SGD, 'step')             # in the middle of a step
if where == 'flush': kill_at(os, 'fsync')                          # a state is written, but not on the disk
if where == 'rename': kill_at(os, 'replace')                       # it is on the disk, but has no name yet
if where == 'lines': kill_at(multigrain.runs.Run, 'write_lines')   # it has its name, the metrics are old
if where == 'norm': kill_at(multigrain.training, 'estimate_statistics') # all steps are taken, the state is older
if where == 'spy': # what each process sees: the views of its groups, and their pairs
    import json
    real = multigrain.training.JointModel.forward
    def forward(self, image, label, instance, generator):
        out = real(self, image, label, instance, generator)
        pairs = self.loss.margin.pairs
        seen = [instance.tolist(), image.flatten(1).sum(1).tolist(), *(o.tolist() for o in pairs[:4])]
        file = os.path.join(os.environ['SPY'], os.environ.get('RANK', '0'))
        with open(file, 'a') as f: print(json.dumps(seen), file=f)
        return out
    multigrain.training.JointModel.forward = forward
if where == 'finish': kill_at(multigrain.training, 'save_model')   # all epochs are there, the network is not
sys.exit(multigrain.launch.main(words))
'''
FILES = 'epoch.safetensors', 'metrics.jsonl', 'model/model.json'

@pytest.fixture(scope='module')
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp('data')/'world', processes=1, progress=False, **SMOKE_WORLD)

def start(world, out, where='nowhere', n=0, limit=0, **parameters):
    given = dict(preset='smoke', data=world, out=out, iterations=3, epochs=2, progress='false', save_minutes=0)
    words = [str(w) for k, v in (given | parameters).items() for w in (f'--{k}', v)]
    return subprocess.Popen([sys.executable, '-c', TRAIN, where, str(n), str(limit), *words], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | dict(OMP_NUM_THREADS='1'))

def run(*args, ok=True, **kwargs):
    p = start(*args, **kwargs)
    out, err = p.communicate(timeout=180)
    assert not ok or p.returncode == 0, err
    return p.returncode, err

def the_run(out): return Run(next(Path(out).glob('smoke-*')))
def content(out):
    "Every byte of the result; of the network's file the tensors, as the order of its header is free."
    folder = the_run(out).folder
    network = load_file(folder/'model'/'model.safetensors')
    return {f: (folder/f).read_bytes() for f in FILES} | {k: v.numpy().tobytes() for k, v in network.items()}

@pytest.fixture(scope='module')
def unbroken(world, tmp_path_factory):
    out = tmp_path_factory.mktemp('unbroken')
    run(world, out)
    assert the_run(out).complete and len(the_run(out).metrics) == 2
    return content(out)

@pytest.mark.parametrize('where,n,workers', [('update', 1, 0), ('update', 5, 2), ('flush', 4, 0), ('rename', 5, 2),
                                             ('lines', 3, 0), ('finish', 1, 0)])
def test_killed_and_continued(world, unbroken, tmp_path, where, n, workers):
    "Bit for bit the same end, wherever it was killed, with any number of workers."
    code, _ = run(world, tmp_path, where, n, ok=False, workers=workers)
    assert code == -signal.SIGKILL
    assert not the_run(tmp_path).complete
    run(world, tmp_path, workers=workers)
    assert content(tmp_path) == unbroken

def test_killed_again_and_again(world, unbroken, tmp_path):
    codes = [run(world, tmp_path, 'update', 3, ok=False)[0] for _ in range(2)]
    assert codes == [-signal.SIGKILL]*2
    run(world, tmp_path)
    assert content(tmp_path) == unbroken

def test_killed_with_the_newer_switches(world, tmp_path):
    "Groups of views, no negatives of the same class, statistics estimated anew: the same end, too."
    newer = dict(group=12, same_class='exclude', bn_steps=2)
    run(world, tmp_path/'whole', **newer)
    for where, n in (('update', 5), ('norm', 1)):
        assert run(world, tmp_path/'parts', where, n, ok=False, **newer)[0] == -signal.SIGKILL
    run(world, tmp_path/'parts', **newer)
    assert content(tmp_path/'parts') == content(tmp_path/'whole')
    assert 'collision' in the_run(tmp_path/'whole').metrics

def test_full_disk_keeps_the_last_state(world, unbroken, tmp_path):
    run(world, tmp_path, 'update', 5, ok=False)
    before = {o.name: o.read_bytes() for o in the_run(tmp_path).folder.glob('*.safetensors')}
    code, err = run(world, tmp_path, limit=100_000, ok=False)
    assert code == 1 and 'cannot write' in err and 'intact' in err and 'Traceback' not in err
    assert before == {o.name: o.read_bytes() for o in the_run(tmp_path).folder.glob('*.safetensors')} and before
    assert not list(the_run(tmp_path).folder.glob('.*.part'))
    run(world, tmp_path)
    assert content(tmp_path) == unbroken

def test_damaged_state_is_not_read(world, tmp_path):
    run(world, tmp_path, 'finish', 1, ok=False)
    file = the_run(tmp_path).folder/'epoch.safetensors'
    file.write_bytes(file.read_bytes()[:-10])
    code, err = run(world, tmp_path, ok=False)
    assert code == 1 and 'epoch.safetensors is damaged' in err and len(err.strip().splitlines()) == 1

@pytest.mark.parametrize('bad,says', [
    (dict(out='/proc/nowhere'), 'cannot write'), (dict(lam=2), 'lam=2'), (dict(m=1), 'm=1'),
    (dict(trunk='resnet5O'), 'resnet50'), (dict(data='/no/where'), '/no/where'), (dict(lamb=1), 'did you mean lam'),
    (dict(resolution=4), 'stride'), (dict(precision='float16'), 'GPU')])
def test_bad_input_is_one_sentence(world, tmp_path, bad, says):
    code, err = run(world, bad.pop('out', tmp_path), ok=False, **bad)
    assert code == 1 and says in err and len(err.strip().splitlines()) == 1
    assert not list(tmp_path.glob('*/epoch.safetensors'))

def test_two_at_once(world, tmp_path):
    "The same run twice at the same time: one trains, the other says so."
    runs = [start(world, tmp_path, iterations=30) for _ in range(2)]
    ends = [(p.communicate(timeout=180)[1], p.returncode) for p in runs]
    assert sorted(code for _, code in ends) == [0, 1] and 'another process' in ''.join(err for err, _ in ends)

def test_two_processes_are_one(world, tmp_path):
    "Half the batch in each of two processes gives the loss of the whole batch, where no statistics are shared."
    frozen = dict(lam=1, batch_norm='frozen', lr=.02)
    run(world, tmp_path/'one', **frozen)
    run(world, tmp_path/'two', processes=2, **frozen)
    one, two = (the_run(tmp_path/o).metrics for o in ('one', 'two'))
    assert abs(one.loss - two.loss).max() < 1e-5
    assert (one.val_images == two.val_images).all() and one.images.tolist() == two.images.tolist()

def test_gathered_pairs_are_those_of_the_whole_batch(world, tmp_path):
    "With pairs across processes, and the same draws, the retrieval term is that of one process."
    joint = dict(lam=0, gather='true', batch_norm='frozen', lr=.02, iterations=2)
    run(world, tmp_path/'one', **joint)
    run(world, tmp_path/'two', processes=2, **joint)
    one, two = (the_run(tmp_path/o).metrics for o in ('one', 'two'))
    assert abs(one.retrieval - two.retrieval).max() < 1e-4 and abs(one.beta - two.beta).max() < 1e-4

def seen_by(folder, processes, groups=4):
    "What the groups of each step saw, in the order of the groups."
    parts = groups//processes
    lines = [[json.loads(o) for o in (folder/str(r)).read_text().splitlines()] for r in range(processes)]
    return [lines[r][i*parts + k] for i in range(len(lines[0])//parts) for r in range(processes) for k in range(parts)]

@pytest.mark.slow
def test_groups_are_the_same_on_1_2_and_4_processes(world, tmp_path, monkeypatch):
    "The same images, views and pairs, and the same weights, statistics and momentum to the bit, after ten steps."
    groups = dict(group=6, batch_norm='group', iterations=10, epochs=1, lr=.01, save_minutes=60)
    spied, found = [], []
    for n in (1, 2, 4):
        (seen := tmp_path/f'seen{n}').mkdir()
        monkeypatch.setenv('SPY', str(seen))
        if n == 1: run(world, tmp_path/'1', 'spy', **groups)
        else: launched(world, tmp_path/str(n), n, groups)
        spied.append(seen_by(seen, n))
        found.append(load_file(the_run(tmp_path/str(n)).folder/'epoch.safetensors'))
        assert the_run(tmp_path/str(n)).record['computed'] == [dict(processes=n, parts=4//n, precision='float32')]
    assert len(spied[0]) == 40 and spied[0] == spied[1] == spied[2]
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert [k for k in other if not found[0][k].equal(other[k])] == []
    assert {int(v) for k, v in found[0].items() if 'num_batches' in k} == {10} # one update a step

def launched(world, out, n, parameters):
    "The script of this file in n processes, through torch's launcher."
    script = out.with_suffix('.py')
    script.write_text(TRAIN)
    given = dict(preset='smoke', data=world, out=out, progress='false') | parameters
    words = [str(w) for k, v in given.items() for w in (f'--{k}', v)]
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc-per-node={n}', str(script)]
    done = subprocess.run([*command, 'spy', '0', '0', *words], capture_output=True, text=True, timeout=300,
                          env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr[-2000:]

def test_another_number_of_processes_continues_at_the_epoch(world, tmp_path):
    frozen = dict(lam=1, batch_norm='frozen', lr=.02)
    run(world, tmp_path/'whole', **frozen)
    run(world, tmp_path/'parts', 'update', 5, ok=False, **frozen)  # one process, dies in its second epoch
    run(world, tmp_path/'parts', processes=2, **frozen)
    whole, parts = (the_run(tmp_path/o).metrics for o in ('whole', 'parts'))
    assert len(parts) == 2 and abs(whole.loss - parts.loss).max() < 1e-5

def children(pid):
    found = subprocess.run(['ps', '--ppid', str(pid), '-o', 'pid='], capture_output=True, text=True).stdout.split()
    return [int(o) for o in found]

def test_a_rank_that_dies_ends_the_job(world, tmp_path):
    "With a sentence, in seconds; the same command then continues."
    how = dict(processes=2, iterations=4, epochs=12)
    p = start(world, tmp_path, **how)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob('smoke-*/step.safetensors')) and time.monotonic() < deadline: time.sleep(.05)
    launcher = children(p.pid)[0]
    os.kill(max(children(launcher)), signal.SIGKILL)
    killed = time.monotonic()
    _, err = p.communicate(timeout=60)
    assert p.returncode == 1 and time.monotonic() - killed < 30
    assert 'ended early' in err and 'Start the same command again' in err
    run(world, tmp_path, **how)
    assert the_run(tmp_path).complete and len(the_run(tmp_path).metrics) == 12

def test_orphans_end(world, tmp_path):
    "Processes of a caller that was killed do not train on."
    p = start(world, tmp_path, processes=2, iterations=4, epochs=200)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob('smoke-*/step.safetensors')) and time.monotonic() < deadline: time.sleep(.05)
    ranks = children(children(p.pid)[0])
    p.kill(); p.wait()
    deadline = time.monotonic() + 20
    def alive():
        stats = [o for pid in ranks if (o := Path(f'/proc/{pid}/stat')).exists()]
        return [o for o in stats if o.read_text().rpartition(')')[2].split()[0] != 'Z']
    while alive() and time.monotonic() < deadline: time.sleep(.2)
    assert len(ranks) == 2 and not alive()
