"""Are the published numbers guarded? Small mistakes are made in the code that computes them, and a test must fail.

`make mutants` (or `python tests/mutants.py --n 100 --seed 0`) works on a temporary copy of the project. A mutant is
first put into its own notebook: the cells before it have run once, and a forked process goes on from there with the
mistake. What its notebook does not see is put into the exported module, and the tests listed in `CHECKS` run.
"""
import argparse, ast, json, linecache, os, random, re, resource, shutil, signal, sys, tempfile, time, types
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
VALUES = 'tests/test_values.py'
CHECKS = { # notebook -> what is asked after it, the fastest first
    '31_recipe': [f'{VALUES} -k recipe'], '60_studies': [f'{VALUES} -k studies', 'nbs/61_claims.ipynb'],
    '61_claims': [f'{VALUES} -k claims'], '43_benchmark': [f'{VALUES} -k "benchmark or studies_values"'],
    '41_evaluate': [f'{VALUES} -k evaluate', 'tests/test_evaluate.py', f'{VALUES} -k studies_values'],
    '05_whiten': [f'{VALUES} -k "whiten or retrieval"'], '03_margin': [f'{VALUES} -k negatives', 'nbs/04_loss.ipynb'],
    '02_sampler': ['tests/test_loading.py -m "not slow"', 'nbs/18_loading.ipynb']}
REASONS = { # survivors that were looked at: (module, line before, line after) -> why no test can fail
    ('margin', "close = (chosen < _PairDistance.CLOSE).nonzero()[:,0]",
     "close = (chosen <= _PairDistance.CLOSE).nonzero()[:,0]"): 'both ways give the same distance',
    ('claims', "PARTS = dict(early=(0, .25), late=(.9, 1)) # of a training",
     "PARTS = dict(early=(0, .25), late=(.9, 2)) # of a training"): 'a slice ends with its list, so nothing changes',
}

# -- mistakes ------------------------------------------------------------------------------------

class Mutant(NamedTuple):
    notebook:str
    cell:str   # id
    line:int   # in the cell, from 0
    before:str # source of the cell
    after:str

    @property
    def lines(self)->tuple: # before, after
        a, b = self.before.splitlines(), self.after.splitlines()
        return next((x.strip(), y.strip()) for x, y in zip(a, b) if x != y)

SWAPS = {ast.Lt: ('<', '<='), ast.LtE: ('<=', '<'), ast.Gt: ('>', '>='), ast.GtE: ('>=', '>'), ast.Eq: ('==', '!='),
         ast.NotEq: ('!=', '=='), ast.In: ('in', 'not in'), ast.NotIn: ('not in', 'in'), ast.Is: ('is', 'is not'),
         ast.IsNot: ('is not', 'is'), ast.Add: ('+', '-'), ast.Sub: ('-', '+'), ast.Mult: ('*', '/'),
         ast.Div: ('/', '*'), ast.FloorDiv: ('//', '*'), ast.Mod: ('%', '*'), ast.Pow: ('**', '*'),
         ast.And: ('and', 'or'), ast.Or: ('or', 'and')}
NAMES = dict(min='max', max='min', any='all', all='any')
NO_NUMBER = 'block', 'workers', 'threads', 'progress', 'seed', 'dpi', 'figsize', 'fontsize' # they decide no result
PICTURE = re.compile('plot|show|draw|panel|figure')

def is_text(node)->bool: return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, 'value', None), str)

def nodes(node):
    "Every expression that decides a number: no annotations, no words of sentences, no sums of text."
    if isinstance(node, ast.JoinedStr) or isinstance(node, ast.keyword) and node.arg in NO_NUMBER: return
    if isinstance(node, ast.FunctionDef) and PICTURE.search(node.name): return
    if isinstance(node, ast.arguments):
        places = (node.posonlyargs + node.args)[-len(node.defaults):] if node.defaults else []
        for a, o in [*zip(places, node.defaults), *zip(node.kwonlyargs, node.kw_defaults)]:
            if o is not None and a.arg not in NO_NUMBER: yield from nodes(o)
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ('annotation', 'returns'): continue
        words = isinstance(node, ast.Call) and name == 'args' and getattr(node.func, 'id', '') == 'require'
        for o in (value[:1] if words else value) if isinstance(value, list) else [value]:
            if isinstance(o, ast.AST): yield from nodes(o)

def between(left, right, op)->list: # of ((line, column), (line, column), new text): the gap with its operator
    return [((left.end_lineno, left.end_col_offset), (right.lineno, right.col_offset), SWAPS[type(op)])]

def edits(node)->list:
    "What can be wrong in one expression."
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not is_text(node.left) and not is_text(node.right):
        return between(node.left, node.right, node.op)
    if isinstance(node, ast.Compare) and len(node.ops) == 1: return between(node.left, node.comparators[0], node.ops[0])
    if isinstance(node, ast.BoolOp): return between(*node.values[:2], node.op)
    at = lambda new: [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), new)] # noqa: E731
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        return [((node.lineno, node.col_offset), (node.operand.lineno, node.operand.col_offset), '')]
    if isinstance(node, ast.Name) and node.id in NAMES: return at(NAMES[node.id])
    if isinstance(node, ast.Constant) and type(node.value) is bool: return at(str(not node.value))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return at(repr(node.value + 1 if type(node.value) is int else 2*node.value or 1.))
    return []

def change(source:str, begin:tuple, end:tuple, new)->str|None:
    "The source with one edit; None if the operator is not found where it should be."
    starts = [0]
    for o in source.encode().splitlines(keepends=True): starts.append(starts[-1] + len(o))
    a, b = (starts[line - 1] + column for line, column in (begin, end))
    data = source.encode()
    gap = data[a:b].decode()
    if isinstance(new, tuple):
        word = rf'\b{new[0]}\b' if new[0][0].isalpha() else re.escape(new[0])
        if len(re.findall(word, gap)) != 1: return None
        new = re.sub(word, new[1], gap)
    return (data[:a] + new.encode() + data[b:]).decode()

def cells(notebook:str, root:Path=ROOT)->list: # of (id, source) of code
    found = json.loads((root/f'nbs/{notebook}.ipynb').read_text())['cells']
    return [(o['id'], ''.join(o['source'])) for o in found if o['cell_type'] == 'code']

def is_exported(source:str)->bool: return re.match(r'#\|\s*(export|exporti)\b', source) is not None

def mutants(notebook:str)->list:
    "Every mistake that this script can make in the exported code of a notebook."
    out = []
    for cell, source in cells(notebook):
        if not is_exported(source): continue
        for node in nodes(ast.parse(source)):
            for begin, end, new in edits(node):
                after = change(source, begin, end, new)
                if after: out.append(Mutant(notebook, cell, begin[0] - 1, source, after))
    return out

def choose(n:int, seed:int, notebooks)->list:
    "As many from each notebook, drawn with the seed."
    out, rng = [], random.Random(seed)
    for i, name in enumerate(notebooks):
        found = mutants(name)
        out += rng.sample(found, min(len(found), n//len(notebooks) + (i < n % len(notebooks))))
    return out

# -- the tests -----------------------------------------------------------------------------------

def skipped(source:str)->bool: # as nbdev_test does
    return 'nbdev_export(' in source or re.search(r'^#\|\s*(eval:\s*false|slow|notest)', source, re.M) is not None

def run_cell(cell:str, source:str, space:dict)->None:
    "One cell, as a kernel would run it; errors show its lines."
    name = f'<cell {cell}>'
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(re.sub(r'^%.*', '', source, flags=re.M), name, 'exec'), space) # without magics of a kernel

def kernel(root:Path)->dict:
    "What a fresh kernel of a notebook knows, in the folder of the notebooks."
    os.chdir(root/'nbs')
    def display(*shown): [repr(o) for o in shown]
    sys.modules['__main__'] = main = types.ModuleType('__main__') # where pickle looks for the classes of cells
    main.__dict__.update(get_ipython=None, display=display)
    return main.__dict__

def quiet()->None:
    "Nothing is printed; time and memory have an end."
    for fd in (1, 2): os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + LIMIT
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    size = int(Path('/proc/self/statm').read_text().split()[0])*resource.getpagesize() if Path('/proc').exists() else 0
    if size: resource.setrlimit(resource.RLIMIT_AS, (size + 6*2**30,)*2)
    signal.alarm(20*LIMIT) # of the clock: the machine may be busy

LIMIT = 120 # seconds of a processor

def passes(what)->bool:
    "Run a function in a forked process: does it end well?"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid(); quiet()
            code = int(bool(what()))
        except BaseException: pass # any error is a failed test
        finally: os._exit(code)
    _, status = os.waitpid(pid, 0)
    try: os.killpg(pid, signal.SIGKILL) # what the test has left behind
    except ProcessLookupError: pass
    return status == 0

def run_rest(found:list, at:int, source:str, space:dict)->None:
    "Go on in a notebook with another source of one cell."
    run_cell(found[at][0], source, space)
    for cell, text in found[at + 1:]:
        if not skipped(text): run_cell(cell, text, space)

def by_notebook(root:Path, notebook:str, some:list)->list: # of mutants that live
    "Run a notebook once; at each changed cell, forked processes go on with the mistakes."
    found, space, live = cells(notebook, root), kernel(root), []
    for i, (cell, source) in enumerate(found):
        for o in (o for o in some if o.cell == cell):
            if passes(lambda: run_rest(found, i, o.after, space)): live.append(o) # noqa: B023
        if not skipped(source): run_cell(cell, source, space)
    return live

def run_check(root:Path, check:str)->int: # 0: passed
    "One of `CHECKS`, in this process."
    import pytest, shlex
    sys.path.insert(0, str(root))
    if check.endswith('.ipynb'):
        space = kernel(root)
        for cell, source in cells(Path(check).stem, root):
            if not skipped(source): run_cell(cell, source, space)
        return 0
    os.chdir(root)
    return pytest.main(['-x', '-q', '-p', 'no:cacheprovider', *shlex.split(check)])

def by_module(root:Path, mutant:Mutant)->bool:
    "Put a mistake into the exported module: does every check pass?"
    file = root/'multigrain'/f'{mutant.notebook[3:]}.py'
    text = file.read_text()
    def body(source): return re.sub(r'^#\|.*\n', '', source, flags=re.M).strip()
    assert text.count(body(mutant.before)) == 1, f'{file.name} is not the export of its notebook: run make export'
    file.write_text(text.replace(body(mutant.before), body(mutant.after)))
    try: return all(passes(lambda: run_check(root, o)) for o in CHECKS[mutant.notebook]) # noqa: B023
    finally: file.write_text(text)

# -- the command ---------------------------------------------------------------------------------

def copy_project(to:Path)->Path:
    "Everything that tests need, in a folder of its own."
    skip = shutil.ignore_patterns('__pycache__', '.git', '.venv', 'runs', 'out', '_docs', '_proc', '.*_cache')
    return Path(shutil.copytree(ROOT, to, ignore=skip, symlinks=True))

def preload()->None:
    "What every test imports is imported once, before any fork; nothing of the project is."
    os.environ |= dict(OMP_NUM_THREADS='1', MPLBACKEND='Agg', IN_TEST='1', PYTHONDONTWRITEBYTECODE='1')
    import fastcore.test, matplotlib.pyplot, numpy, pandas, PIL.Image, pytest, torch, torchvision # noqa: F401
    torch.set_num_threads(1)

def of_notebook(notebook:str, some:list, report:Path)->None:
    "All mutants of one notebook; a line of the report for each."
    with tempfile.TemporaryDirectory(prefix='mutants') as folder:
        root = copy_project(Path(folder)/'project')
        os.environ |= dict(PYTHONPATH=str(root), MULTIGRAIN_ROOT=str(root), MULTIGRAIN_RUNS=f'{folder}/runs')
        pipe, out = os.pipe()
        pid = os.fork()
        if pid == 0: # the notebook imports the module as it is: in a process of its own
            try:
                sys.path.insert(0, str(root))
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                live = by_notebook(root, notebook, some)
                os.write(out, ' '.join(str(some.index(o)) for o in live).encode() + b'.')
                os._exit(0)
            finally: os._exit(1)
        os.close(out)
        os.waitpid(pid, 0)
        said = os.read(pipe, 2**16).decode()
        assert said.endswith('.'), f'nbs/{notebook}.ipynb fails without any mistake'
        live = [some[int(o)] for o in said[:-1].split()]
        if live:
            for check in CHECKS[notebook]:
                assert passes(lambda: run_check(root, check)), f'{check} fails without any mistake' # noqa: B023
        live = [o for o in live if by_module(root, o)]
    with report.open('a') as f: f.write(''.join(json.dumps([o in live, *o]) + '\n' for o in some))

def all_notebooks(some:list, processes:int, report:Path)->None:
    "Notebook by notebook, several at once."
    todo, running = list(dict.fromkeys(o.notebook for o in some)), set()
    while todo or running:
        while todo and len(running) < processes:
            name = todo.pop(0)
            if (pid := os.fork()) == 0:
                try: of_notebook(name, [o for o in some if o.notebook == name], report); os._exit(0)
                except BaseException as e: print(f'{name}: {e!r}', file=sys.stderr, flush=True)
                finally: os._exit(1)
            running.add(pid)
        running.discard(os.wait()[0])

def main()->int: # exit code
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--n', type=int, default=100, help='mutants in all')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--processes', type=int, default=os.cpu_count())
    parser.add_argument('--notebooks', nargs='*', default=list(CHECKS), choices=list(CHECKS))
    parser.add_argument('--least', type=float, default=90., help='percent that must be killed')
    given = parser.parse_args()
    begun, some = time.time(), choose(given.n, given.seed, given.notebooks)
    preload()
    with tempfile.TemporaryDirectory(prefix='mutants') as folder:
        report = Path(folder)/'report.jsonl'
        all_notebooks(some, given.processes, report)
        rows = [json.loads(o) for o in report.read_text().splitlines()] if report.exists() else []
    if lost := len(some) - len(rows):
        print(f'{lost} of {len(some)} mutants were not tried: see above')
        return 1
    tried, lived = Counter(o[1] for o in rows), Counter(o[1] for o in rows if o[0])
    for name in tried: print(f'{name:14s} {tried[name] - lived[name]} of {tried[name]} killed')
    for live, *fields in rows:
        o = Mutant(*fields)
        if not live: continue
        why = REASONS.get((o.notebook[3:], *o.lines), 'no reason known: a test is missing')
        print(f'\n{o.notebook} cell {o.cell} line {o.line}\n- {o.lines[0]}\n+ {o.lines[1]}\n  {why}')
    share = 100*(1 - sum(lived.values())/max(1, len(rows)))
    print(f'\n{share:.0f} % of {len(rows)} mutants killed, seed {given.seed}, {(time.time() - begun)/60:.0f} minutes')
    return int(share < given.least)

if __name__ == '__main__': sys.exit(main())
