"""The rooms of the house: which module imports which, as a picture, and how wide the lines are.

`python nbs/docs/rooms.py` (or `make rooms`) writes nbs/images/rooms.png and prints the figures of CONTRIBUTING."""
import ast, re, statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECADES = {
    0: 'ideas',
    1: 'images',
    2: 'networks',
    3: 'training',
    4: 'scores',
    5: 'looking, searching',
    6: 'the paper',
}

def rooms()->dict: # module -> number
    "The number of each module: that of its notebook."
    found = {}
    for nb in sorted((ROOT/'nbs').glob('[0-9][0-9]_*.ipynb')):
        if m := re.search(r'#\| *default_exp (\w+)', nb.read_text(encoding='utf-8')): found[m[1]] = int(nb.name[:2])
    return found

def imports(module:str)->list: # of (module, name)
    "What a module imports from the others, wherever the import stands."
    tree, found = ast.parse((ROOT/'multigrain'/f'{module}.py').read_text(encoding='utf-8')), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or '').startswith('multigrain')):
            room = (node.module or '').removeprefix('multigrain').lstrip('.')
            found += [(room, o.name) if room else (o.name, '') for o in node.names]
        if isinstance(node, ast.Import):
            found += [(o.name.split('.')[1], '') for o in node.names if o.name.startswith('multigrain.')]
    return [o for o in found if o[0] != module] # a process may be sent a function of its own module

def widths()->dict:
    "Figures of the exported lines."
    lines = [l for m in rooms() for l in (ROOT/'multigrain'/f'{m}.py').read_text(encoding='utf-8').splitlines()]
    lines = [l for l in lines if l.strip() and not l.startswith(('# %%', '__all__'))] # written by nbdev
    sizes = sorted(map(len, lines))
    raises = sum(bool(re.search(r'\braise ', l)) for l in lines)
    return {
        'lines': len(lines),
        'median width': statistics.median_low(sizes),
        '95 % within': sizes[int(0.95 * len(sizes))],
        'longest': sizes[-1],
        'over 120': sum(o > 120 for o in sizes),
        'raise per 1000 lines': 1000 * raises // len(lines),
    }

def draw(to:Path)->None:
    "Rooms from left to right by decade; a line is an import, from the room to the left into the one to the right."
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    numbers = rooms()
    at = {m: (n//10, -(n % 10)) for m, n in numbers.items()}
    fig, ax = plt.subplots(figsize=(13, 6), dpi=80, layout='constrained')
    for m in numbers:
        for room in {o for o, _ in imports(m)} - {'basics'}: # everybody stands on basics
            (x0, y0), (x1, y1) = at[room], at[m]
            bend = .25 if x0 == x1 else .08
            ax.annotate('', (x1 - .02, y1), (x0 + .02, y0), arrowprops=dict(arrowstyle='-|>', lw=.7, alpha=.35,
                        color=f'C{x0}', connectionstyle=f'arc3,rad={bend}', shrinkA=16, shrinkB=16))
    for m, (x, y) in at.items():
        ax.text(x, y, f'{numbers[m]:02} {m}', ha='center', va='center', fontsize=9,
                bbox=dict(boxstyle='round,pad=.35', fc='w', ec=f'C{x}', lw=1.4))
    for x, name in DECADES.items(): ax.text(x, .9, name, ha='center', fontsize=11, weight='bold', color=f'C{x}')
    ax.set(xlim=(-.6, 6.6), ylim=(-8.6, 1.3))
    ax.axis('off')
    fig.savefig(to)

if __name__ == '__main__':
    draw(ROOT/'nbs/images/rooms.png')
    for k, v in widths().items(): print(f'{k:22s}{v}')
