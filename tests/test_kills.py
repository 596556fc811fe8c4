"Trainings of several processes, killed at every kind of moment and continued: nothing is lost."
import json, os, subprocess, sys
from pathlib import Path

import pytest
sys.path.insert(0, str(Path(__file__).parent))
from kills import IN_GROUPS, MOMENTS, cases, few, of_groups

ROOT = Path(__file__).resolve().parent.parent

def kills(*words):
    "What the script prints, with the table."
    done = subprocess.run([sys.executable, ROOT/'tests'/'kills.py', '--few', *words], text=True,
                          capture_output=True, env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT)))
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout

@pytest.mark.slow
@pytest.mark.parametrize('processes', [2, 3])
def test_every_kind_of_moment(processes):
    "One kill for each kind of moment, and one in each process before it goes on with one process."
    said = kills('--processes', str(processes))
    assert said.count('the same end') == len(MOMENTS) + processes + 1 # and the head of the table

@pytest.mark.slow
def test_groups_of_views():
    "Batch norm and pairs of groups, as in the preset paper: four kinds of moment, then another number of processes."
    assert kills('--groups', '--processes', '2').count('the same end') == 4 + 2 + 1

def test_which_calls_are_tried():
    counts = [{'update': 6, 'writes the network': 1}, {'update': 6}, {'update': 5}]
    assert few(counts) == [('update', 5, 2), ('writes the network', 1, 0)]
    ends = [('update', 1, 0), ('update', 6, 0), ('update', 1, 2), ('update', 5, 2), ('writes the network', 1, 0)]
    assert cases(counts) == ends
    assert len(cases(counts, every=True)) == 18
    assert of_groups(counts) == [('update', 5, 2)]

def test_the_table_of_the_docs_is_whole():
    "What `python tests/kills.py --write` wrote: every moment with two and three processes, nothing lost."
    rows = json.loads((ROOT/'data'/'kills.json').read_text())
    assert {(n, o) for n in (2, 3) for o in MOMENTS} <= {(o['processes'], o['moment']) for o in rows}
    grouped = {(o['processes'], o['moment']) for o in rows if o['moment'].endswith(IN_GROUPS)}
    assert {(n, f'{o}{IN_GROUPS}') for n in (2, 3) for o in ('update', 'forward and backward')} <= grouped
    assert all(o['lost'] == 0 and o['same'] == o['cases'] > 0 for o in rows)
