"""A training is killed at every kind of moment, in every process of several, and continued: what is lost?

python tests/kills.py [--processes 2 3] [--few | --every] [--groups] [--write]
Each moment is tried at its first and at its last call in the first and in the last process; with --every at all calls
in all processes, with --few at its last call in the last process that comes to it. With --groups batch norm is that of
groups of views, as in the preset paper, and only what depends on it is tried. --write keeps the table in
data/kills.json, which nbs/33_launch.ipynb shows; rows of the other mode stay.

Processes are forked from one that has imported everything, which takes the place of torchrun: it ends the others when
one of them dies. (That torchrun does so is tested in test_training.py.)"""
import argparse, json, os, signal, socket, sys, tempfile, time
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == '__main__': sys.path.insert(0, str(ROOT))
import torch, torch.distributed as dist
from safetensors.torch import load_file
import multigrain.launch, multigrain.runs, multigrain.training
from multigrain.datasets import SMOKE_WORLD
from multigrain.runs import Run
from multigrain.world import make_world

T = multigrain.training
# name of a moment -> owner and name of what is called then; the process dies before the call
MOMENTS = {'joins the others': (dist, 'init_process_group'), 'opens the run': (multigrain.launch, 'open_training'),
           'notes the images': (multigrain.launch, 'check_contents'), 'waits for the others': (dist, 'barrier'),
           'reads the state': (T, 'latest_state'), 'forward and backward': (T.Learner, 'backward'),
           'update': (torch.optim.SGD, 'step'), 'asks if it is time to save': (T.Trainer, 'time_to_save'),
           'gathers for a state': (dist, 'all_gather_object'), 'writes a state': (T, 'save_state'),
           'a file is written, not on the disk': (os, 'fsync'), 'it is on the disk, without a name': (os, 'replace'),
           'writes the metrics': (multigrain.runs.Run, 'write_lines'), 'validates': (T, 'validate'),
           'adds up over processes': (T, 'sum_over_processes'), 'after an epoch': (T.Trainer, 'after_epoch'),
           'writes the network': (T, 'save_model'), 'writes the result': (multigrain.runs.Run, 'note')}
FILES = 'epoch.safetensors', 'metrics.jsonl', 'model/model.json'
USUAL = dict(preset='smoke', batch_size=36, iterations=3, epochs=2, progress='false', save_minutes=0, workers=0)
FROZEN = dict(lam=1, batch_norm='frozen', lr=.02) # the same numbers for any number of processes, to rounding
# Six groups, which 1, 2 and 3 processes can share. With lr=.05 the loss grows, and so does rounding: two trainings that
# nobody killed, of 1 and of 3 processes, differ by 3e-5 after six steps; with .02 by 4e-8.
GROUPED = dict(group=6, batch_norm='group', lr=.02)
IN_GROUPS = ' (groups)' # at the end of the name of such a moment
LIMIT = 300 # seconds for a training of six steps

def arm(moment:str, n:int, calls:Counter|None=None)->None:
    "Die before the n-th call of a moment; with a counter: count the calls of all moments instead."
    def wrap(name, owner, attribute):
        real = getattr(owner, attribute)
        def called(*args, **how):
            count[name] += 1
            if name == moment and count[name] == n: os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **how)
        setattr(owner, attribute, called)
    count = Counter() if calls is None else calls
    for name, where in MOMENTS.items(): wrap(name, *where)

def one_rank(rank:int, n:int, port:int, words:list, log:Path, kill:tuple|None, calls:Path|None)->None:
    "What a forked process does; it never returns."
    code, counter = 1, Counter()
    try:
        with open(log, 'a') as f: os.dup2(f.fileno(), 1); os.dup2(f.fileno(), 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR='127.0.0.1',
                          MASTER_PORT=str(port))
        if n == 1: del os.environ['RANK']
        if kill and kill[2] == rank: arm(*kill[:2])
        if calls: arm('', 0, counter)
        code = multigrain.launch.main(words)
        if calls: calls.with_name(f'{calls.name}{rank}').write_text(json.dumps(counter))
    finally: os._exit(code)

def free_port()->int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def train(n:int, out:Path, world:Path, kill:tuple|None=None, calls:Path|None=None, **more)->list: # exit codes
    "A training of n processes; when one dies the others are ended, as torchrun does it."
    given = USUAL | dict(data=world, out=out) | more
    words, port, pids, codes = [str(w) for k, v in given.items() for w in (f'--{k}', v)], free_port(), {}, {}
    for rank in range(n):
        if (pid := os.fork()) == 0: one_rank(rank, n, port, words, out.with_suffix('.log'), kill, calls)
        pids[pid] = rank
    end = time.monotonic() + LIMIT
    while len(codes) < n:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid: codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        else: time.sleep(.01)
        if time.monotonic() > end: [os.kill(o, signal.SIGKILL) for o in pids]; end += 10
        elif any(codes.values()): [os.kill(o, signal.SIGTERM) for o in pids]
    return [codes[rank] for rank in range(n)]

def the_run(out:Path)->Run: return Run(next(out.glob('smoke-*')))

def content(out:Path)->dict:
    "Every byte of a result; of the network's file the tensors, as the order of its header is free."
    folder = the_run(out).folder
    network = load_file(folder/'model'/'model.safetensors')
    return {f: (folder/f).read_bytes() for f in FILES} | {k: v.numpy().tobytes() for k, v in network.items()}

def few(counts:list)->list: # of (moment, call, rank)
    "The last call of each moment, in the last process that comes to it."
    ranks = {o: [r for r, c in enumerate(counts) if c.get(o)] for o in MOMENTS}
    return [(o, counts[ranks[o][-1]][o], ranks[o][-1]) for o in MOMENTS if ranks[o]]

def cases(counts:list, every:bool=False)->list: # of (moment, call, rank)
    "Which calls of which moments, from how often each process made them."
    ranks = range(len(counts)) if every else sorted({0, len(counts) - 1})
    found = []
    for moment in MOMENTS:
        for rank in ranks:
            last = counts[rank].get(moment, 0)
            calls = range(1, last + 1) if every else sorted({1, last} - {0})
            found += [(moment, k, rank) for k in calls if k <= last]
    return found

def of_groups(counts:list)->list: # of (moment, call, rank)
    "Only the moments that groups of views change."
    changed = 'forward and backward', 'update', 'gathers for a state', 'adds up over processes'
    return [o for o in few(counts) if o[0] in changed]

def enumerate_kills(n:int, place:Path, world:Path, choose=cases, tell=print, **more)->list: # of rows
    "Kill a training of n processes at each case, continue it, compare the ends."
    for out in ('first', 'whole'): # the first one fills the cache of the images
        codes = train(n, place/out, world, calls=place/'calls', **more)
        assert codes == [0]*n, (place/f'{out}.log').read_text()
    assert content(place/'first') == content(place/'whole'), 'two trainings that nobody killed differ'
    counts = [json.loads((place/f'calls{rank}').read_text()) for rank in range(n)]
    whole, rows = content(place/'whole'), {}
    for i, kill in enumerate(todo := choose(counts)):
        out = place/f'case{i}'
        died = train(n, out, world, kill, **more)[kill[2]] == -signal.SIGKILL
        again = train(n, out, world, **more)
        same = died and again == [0]*n and content(out) == whole
        name = kill[0] + IN_GROUPS*bool(more)
        row = rows.setdefault(name, dict(processes=n, moment=name, cases=0, same=0, lost=0))
        row['cases'] += 1; row['same' if same else 'lost'] += 1
        which = f'{n} processes, {i + 1}/{len(todo)}: rank {kill[2]}, {kill[0]}, call {kill[1]}'
        tell(f'{which}: {"the same end" if same else "LOST"}')
        if not same: tell((out.with_suffix('.log')).read_text()[-2000:])
    return list(rows.values())

def change_number(before:int, after:int, place:Path, world:Path, tell=print, more=FROZEN)->dict: # a row
    "Killed in the second epoch with one number of processes, continued with another."
    name = f'update; goes on with {after}' + IN_GROUPS*(more is GROUPED)
    row = dict(processes=before, moment=name, cases=0, same=0, lost=0)
    train(1, place/'whole', world, **more)
    whole = the_run(place/'whole').metrics
    for rank in range(before):
        out = place/f'rank{rank}'
        died = train(before, out, world, ('update', 5, rank), **more)[rank] == -signal.SIGKILL
        again = train(after, out, world, **more)
        now = the_run(out).metrics
        same = died and again == [0]*after and len(now) == len(whole) and float(abs(now.loss - whole.loss).max()) < 1e-5
        row['cases'] += 1; row['same' if same else 'lost'] += 1
        tell(f'{before} -> {after} processes, rank {rank}: {"the same end, to rounding" if same else "LOST"}')
        if not same: tell((out.with_suffix('.log')).read_text()[-2000:])
    return row

def table(rows:list)->str: # Markdown
    "The bookkeeping, with its sums."
    def line(*words): return '| ' + ' | '.join(map(str, words)) + ' |'
    total = [sum(o[k] for o in rows) for k in ('cases', 'same', 'lost')]
    body = [line(o['processes'], o['moment'], o['cases'], o['same'], o['lost']) for o in rows]
    return '\n'.join([line('processes', 'killed when it', 'cases', 'the same end', 'lost'), line(*['---']*5), *body,
                      line('', 'all', *total)])

def keep(rows:list, groups:bool)->None:
    "Write the rows of one mode, beside those of the other."
    file = ROOT/'data'/'kills.json'
    kept = [o for o in json.loads(file.read_text()) if o['moment'].endswith(IN_GROUPS) != groups]
    file.write_text(json.dumps(kept + rows if groups else rows + kept, indent=1) + '\n')

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--processes', type=int, nargs='*', default=[2, 3])
    parser.add_argument('--every', action='store_true')
    parser.add_argument('--few', action='store_true')
    parser.add_argument('--groups', action='store_true')
    parser.add_argument('--write', action='store_true')
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as d:
        os.environ['MULTIGRAIN_CACHE'] = d + '/cache'
        world, rows = make_world(Path(d)/'world', processes=1, progress=False, **SMOKE_WORLD), []
        def place(name): (made := Path(d)/name).mkdir(); return made
        choose = of_groups if given.groups else few if given.few else partial(cases, every=given.every)
        more = GROUPED if given.groups else {}
        for n in given.processes: rows += enumerate_kills(n, place(f'kills{n}'), world, choose, **more)
        for before in given.processes:
            for after in (1, 2, 3)[:1 if given.few else 3]:
                if before == after: continue
                there = place(f'change{before}{after}')
                rows.append(change_number(before, after, there, world, more=more or FROZEN))
    print(table(rows))
    if given.write: keep(rows, given.groups)
    return any(o['lost'] for o in rows)

if __name__ == '__main__': sys.exit(main())
