"The rules of the house: imports only from rooms with a lower number, only public names; no method by assignment."
import ast, re, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'nbs'/'docs'))
from rooms import imports, rooms, widths

NUMBERS = rooms()

def test_every_module_has_a_room():
    assert {o.stem for o in (ROOT/'multigrain').glob('[!_]*.py')} == set(NUMBERS)
    assert len(set(NUMBERS.values())) == len(NUMBERS), 'two rooms have one number'

@pytest.mark.parametrize('module', NUMBERS)
def test_imports_only_lower_rooms_and_public_names(module):
    for room, name in imports(module):
        assert NUMBERS[room] < NUMBERS[module], f'{module} imports {room}, which stands above it'
        assert not name.startswith('_'), f'{module} imports the private name {room}.{name}'

@pytest.mark.parametrize('module', NUMBERS)
def test_methods_stand_in_their_class(module):
    text = (ROOT/'multigrain'/f'{module}.py').read_text()
    assert not re.findall(r'^[A-Z]\w+\.\w+ = ', text, re.M)
    named = [o.targets[0].id for o in ast.walk(ast.parse(text)) if isinstance(o, ast.Assign)
             and isinstance(o.value, ast.Lambda) and isinstance(o.targets[0], ast.Name)]
    assert not named, f'lambdas with a name: {named}'

def test_lines_can_be_read():
    found = widths()
    assert found['95 % within'] <= 100 and found['over 120'] == 0
    assert found['raise per 1000 lines'] <= 13
