"The folders of the whole paper, as a lab has them: what is read, what is refused before anything starts, what goes on."
import ast, dataclasses, json, os, shlex, struct
from pathlib import Path

import numpy as np, pytest
from PIL import Image
from multigrain import page
from multigrain.catalog import open_benchmark
from multigrain.datasets import training_sets
from multigrain.studies import STUDIES, find_study, notebooks, set_title, wanted_jobs

ROOT = Path(__file__).resolve().parents[1]

# -- the devkit, as MATLAB writes it -------------------------------------------------------------

def element(kind, data): return struct.pack('<II', kind, len(data)) + data + bytes(-len(data) % 8)

def matrix(flag, name, *parts):
    "A variable, or a cell of a structure."
    head = element(6, struct.pack('<II', flag, 0)) + element(5, struct.pack('<ii', 1, 1)) + element(1, name.encode())
    return element(14, head + b''.join(parts))

def meta(wnids):
    "meta.mat of some classes: their numbers and wnids."
    names = b''.join(o.encode().ljust(16, b'\0') for o in ('ILSVRC2012_ID', 'WNID'))
    cells = [o for i, wnid in enumerate(wnids, 1) for o in
             (matrix(6, '', element(9, struct.pack('<d', i))), matrix(4, '', element(16, wnid.encode())))]
    synsets = matrix(2, 'synsets', element(5, struct.pack('<i', 16)), element(1, names), *cells)
    return b'MATLAB 5.0 MAT-file'.ljust(124) + b'\0\1IM' + synsets

def picture(file, colour):
    Image.new('RGB', (40, 30), colour).save(file)
    return file

def link(source, *files):
    "Links to a picture; of several, each file is the next one."
    some = source if isinstance(source, list) else [source]
    for i, o in enumerate(files):
        o.parent.mkdir(parents=True, exist_ok=True)
        os.link(some[i % len(some)], o)

def pictures(folder, n, seed=0):
    "Different pictures: coarse noise, which survives a small resolution."
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for i in range(n):
        noise = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
        noise.resize((40, 30)).save(folder/f'{i:03}.jpg')
    return sorted(folder.iterdir())

def imagenet(root, n, flat=True, train='train', val='val'):
    "ImageNet with n classes, two training images and one validation image of each."
    source, wnids = picture(root/'source.jpg', (9, 99, 200)), [f'n{i:08}' for i in range(n)]
    some = [source, *pictures(root/'shown', 16, 2)]
    link(some, *(root/train/o/f'{o}_{i}.JPEG' for o in wnids for i in range(2)))
    numbers = np.random.default_rng(0).permutation(n) # the devkit has another order than the names
    names = [f'ILSVRC2012_val_{i + 1:08}.JPEG' for i in range(n)]
    link(some, *(root/val/('' if flat else wnids[k])/o for o, k in zip(names, numbers)))
    kit = root/'ILSVRC2012_devkit_t12/data'
    kit.mkdir(parents=True)
    order = wnids[::-1] # number i + 1 in the devkit
    (kit/'meta.mat').write_bytes(meta(order))
    lines = [str(order.index(wnids[k]) + 1) for k in numbers]
    (kit/'ILSVRC2012_validation_ground_truth.txt').write_text('\n'.join(lines))
    return numbers

@pytest.mark.parametrize('flat,train,val', [(True, 'train', 'val'), (False, 'train', 'val'),
                                            (True, 'ILSVRC2012_img_train', 'ILSVRC2012_img_val')])
def test_labels_of_the_validation_images(tmp_path, flat, train, val):
    "Flat with the devkit or in folders: the same labels."
    numbers = imagenet(tmp_path, 7, flat, train, val)
    _, found = training_sets(str(tmp_path))
    by_name = dict(zip((Path(o).name for o in found.paths), found.labels))
    assert [by_name[o] for o in sorted(by_name)] == numbers.tolist() and len(found.classes) == 7

def test_labels_are_needed(tmp_path):
    "A flat folder without the devkit would train for weeks and then score nothing."
    imagenet(tmp_path, 3)
    (tmp_path/'ILSVRC2012_devkit_t12/data/meta.mat').unlink()
    with pytest.raises(ValueError, match='no devkit with meta.mat'): training_sets(str(tmp_path))

def test_rotations_beside_holidays_are_read(tmp_path):
    names = [f'10{i:02}0{k}.jpg' for i in range(2) for k in range(2)]
    link(picture(tmp_path/'a.jpg', (1, 2, 3)), *(tmp_path/'holidays/jpg'/o for o in names))
    plain = open_benchmark('holidays', tmp_path, incomplete=True)
    assert 'no rotation list used' in plain.note and (plain.turns < 0).all()
    (tmp_path/'holidays/rotations.json').write_text(json.dumps({'100000.jpg': 90}))
    turned = open_benchmark('holidays', tmp_path, incomplete=True)
    assert turned.turns.tolist() == [90, 0, 0, 0] and 'rotation list used, 1 image turned' in turned.note

class Noted:
    "A run that was scored on sets with these notes."
    def __init__(self, folder, **notes):
        self.run = self
        self.folder = folder
        (folder/'scores.json').write_text(json.dumps(dict(notes=notes)))

def test_tables_say_when_no_rotation_list_was_used(tmp_path):
    runs = [Noted(tmp_path, holidays='no rotation list used')]
    assert set_title(runs, 'holidays') == 'holidays (mAP, %, no rotation list)'
    assert set_title(runs, 'ukbench') == 'ukbench (of 4)'
    runs = [Noted(tmp_path, holidays='rotation list used, 9 images turned')]
    assert set_title(runs, 'holidays') == 'holidays (mAP, %)'

# -- everything at once --------------------------------------------------------------------------

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "The whole paper's folders with all their files, tiny; distractors and whitening are a part."
    root = tmp_path_factory.mktemp('datasets')
    imagenet(root, 1000)
    a, b = [root/'source.jpg', *pictures(root/'pictures', 61)], pictures(root/'others', 200, 1)
    groups = [(g, k) for k in range(3) for g in range(1000, 1500)][:1491]
    link(a, *(root/f'holidays/jpg/{g}{k:02}.jpg' for g, k in groups))
    (root/'holidays/rotations.json').write_text(json.dumps({'100000.jpg': 90, '149901.jpg': 270}))
    link(a, *(root/f'ukbench/full/ukbench{i:05}.jpg' for i in range(10200)))
    link(a, *(root/f'copydays/original/{200000 + 100*i}.jpg' for i in range(157)))
    link(a, *(root/f'copydays/strong/{200000 + 100*(i % 157) + 1 + i//157}.jpg' for i in range(229)))
    link(a, *(root/f'distractors/{i}.jpg' for i in range(100)))
    link(b, *(root/f'whiten/{i}.jpg' for i in range(200)))
    return root

@pytest.mark.slow
def test_a_whole_layout_is_accepted_and_each_gap_is_named(whole):
    study = dataclasses.replace(STUDIES['paper'], data=str(whole))
    assert page.check_data(study) == []
    assert page.count_extra(study) == ['images of distractors 100 (paper: 10,000), whiten 200 (paper: 20,000)']
    link(whole/'source.jpg', whole/'whiten/same.jpg')
    wrong = page.check_data(study)
    assert len(wrong) == 3 and all('same.jpg' in o and 'are in whiten too' in o for o in wrong)
    (whole/'whiten/same.jpg').unlink()
    (whole/'ukbench/full/ukbench00007.jpg').unlink()
    assert ['10199 of 10200' in o for o in page.check_data(study)] == [True]
    (whole/'copydays').rename(whole/'copy')
    assert page.check_data(study) == [f'data={whole}: there is no folder copydays']

# -- what fails does not end the rest ------------------------------------------------------------

def test_a_broken_notebook_does_not_end_the_others(tmp_path, monkeypatch):
    import papermill
    from papermill.exceptions import PapermillExecutionError
    seen = []
    def execute(source, target, **how):
        seen.append((Path(source).stem, how['parameters']['train']))
        if 'table_3' in source: raise PapermillExecutionError(1, 1, 'x', 'ValueError', 'no such arm\nat all', [])
        if 'figure_3' in source: raise OSError(28, 'No space left on device')
    monkeypatch.setattr(papermill, 'execute_notebook', execute)
    monkeypatch.setattr(page, 'train_needed', lambda *args: ['1 runs failed'])
    found = page.make_study(find_study('mini'), ['table_2', 'table_3', 'figure_3', 'ablations'], True, str(tmp_path))
    assert seen == [(o, False) for o in ('table_2', 'table_3', 'figure_3', 'ablations')] # nobody trains again
    assert found == ['1 runs failed', 'table_3: ValueError: no such arm',
                     'figure_3: OSError: [Errno 28] No space left on device']

def test_weights_are_looked_for_before_anything_is_trained(tmp_path, monkeypatch):
    def missing(name): raise OSError(f'{name} could not be downloaded')
    monkeypatch.setattr(page, 'open_model', missing)
    monkeypatch.setattr(page, 'check_data', lambda study: [])
    monkeypatch.setattr(page, 'plan', lambda *args: pytest.fail('it went on'))
    with pytest.raises(ValueError) as e: page.make_all('paper', str(tmp_path), dry=True)
    assert [o in str(e.value) for o in ('senet154', 'pnasnet5large', 'trunk:resnet50')] == [True]*3
    assert 'lite0' not in str(e.value) # figure 3 has the paper's network there

def test_arms_that_are_no_rows_can_be_left_out(tmp_path):
    study = find_study('paper', str(tmp_path))
    arms = {o.arm for o in wanted_jobs(study, notebooks(study))}
    rows = {o.arm for o in wanted_jobs(study, notebooks(study, rows=True))}
    assert arms - rows == {'lam=0.1', 'lam=0.9', 'RA m=2', 'RA m=5', 'published sampling', 'learned p'}
    assert len(rows) == 8

def test_whitening_images_are_embedded_once_a_resolution(tmp_path, monkeypatch):
    "Once for all benchmarks, and with the same scores as if each had done it."
    from multigrain import benchmark, studies
    from multigrain.model import MultiGrain
    study, net, seen, real = find_study('smoke'), MultiGrain('mini', 3., 4, seed=1).eval(), [], studies.embed
    def spy(model, images, s, *args, **more):
        seen.append(s)
        return real(model, images, s, *args, **more)
    monkeypatch.setattr(studies, 'embed', spy)
    fits, fit = [], benchmark.Whitening.fit
    monkeypatch.setattr(benchmark.Whitening, 'fit', lambda *args: fits.append(args[1:]) or fit(*args))
    rows = studies.network_scores(tmp_path, lambda: net, study, ['holidays', 'copydays'], 'smoke')
    assert seen == [32, 48] and len(fits) == 2*10*2 # s, p and shrinkage, for both benchmarks together
    alone = studies.measure_set(net, study, 'copydays', 48, studies.open_set(study, 'copydays'))
    assert [o for o in rows if (o.set, o.s) == ('copydays', 48)] == alone
    assert json.loads((tmp_path/'scores.json').read_text())['notes']['holidays']

# -- a miniature, and folders of others ----------------------------------------------------------

@pytest.fixture
def drawn(tmp_path):
    "Links to the folders of a drawn world, by name; one picture more for each class of a network."
    from multigrain.datasets import world_folder
    def make(*names, classes=0):
        root = tmp_path/'+'.join(names)
        root.mkdir()
        for o in names: (root/o).symlink_to(world_folder('smoke')/o)
        for i in range(classes):
            (root/f'val/{i}').mkdir(parents=True)
            Image.new('RGB', (90, 70), (20*i, 200 - 20*i, 90)).save(root/f'val/{i}/a.png')
        return root
    return make

def test_networks_of_others_know_more_classes_than_a_miniature(tmp_path, drawn, monkeypatch):
    "ResNet-50 of the model zoo has a thousand classes, the miniature a few: the labels are those of the whole set."
    from multigrain import rehearse, studies
    from multigrain.model import MultiGrain
    from multigrain.resolution import finetune_p
    study = dataclasses.replace(STUDIES['paper'], data=str(drawn('train', 'val')), s=(32, 48), sets=(), common=dict(
        trunk='mini', resolution=32, batch_size=32, group=8))
    rehearse.miniature(study, tmp_path/'small')
    file = tmp_path/'small/rehearsal.json'
    record, few = json.loads(file.read_text()), training_sets(str(tmp_path/'small'))[1]
    assert record['classes'] == few.classes == training_sets(study.data)[0].classes
    every = sorted([*few.classes, *(f'n{i:08}' for i in range(1000 - len(few.classes)))])
    file.write_text(json.dumps(record | dict(classes=every)))

    class Opened: model = MultiGrain('mini', 1., 1000)
    monkeypatch.setattr(studies, 'open_model', lambda name: Opened)
    small = find_study('paper', str(tmp_path/'small'))
    (scored,) = studies.shelf_scores(small, ['val'], root=tmp_path/'scores')
    assert {(o.set, o.s) for o in scored.rows} == {(f'val top-{k}', s) for k in (1, 5) for s in (32, 48)}
    learn, val = (studies.with_all_classes(o, small.data) for o in training_sets(small.data))
    assert [val.classes[i] for i in val.labels] == [few.classes[i] for i in few.labels] and len(val.classes) == 1000
    assert finetune_p(Opened.model, learn, 32, per_class=1, progress=False).p > 0 # table E.1
    def ours(): return MultiGrain('mini', 3., len(few.classes))
    own = studies.network_scores(tmp_path/'own', ours, small, ['val'], small.data)
    assert len(own) == 2*10 # our own networks know those of the miniature: fewer than five classes have no top-5

def checkpoint(file, kind, fixtures=ROOT.parent/'shared/fixtures'):
    "A file as the authors publish them, ResNet-18 with ten classes: that of the project, or made here."
    import gzip, torch
    from multigrain.model import MultiGrain
    file.parent.mkdir()
    if (packed := fixtures/f'resnet18_{kind}.pth.gz').is_file():
        return file.write_bytes(gzip.decompress(packed.read_bytes()))
    net = MultiGrain('resnet18', 3., 10)
    parts = {k: v for k, v in net.state_dict().items() if k.startswith(('trunk', 'classifier'))}
    state = {k.replace('trunk.', 'features.', 1): v for k, v in parts.items()}
    torch.save(dict(model_state=state | {'pool.p': torch.tensor([net.p])}), file)

@pytest.mark.slow
@pytest.mark.parametrize('classes,kind', [(0, 'plain'), (10, 'whitened')])
def test_published_networks_without_training_images(tmp_path, drawn, monkeypatch, capsys, classes, kind):
    "Benchmarks alone, or validation images too: what is not there is left out, and no other folder takes its place."
    from multigrain import published, studies
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(tmp_path/'runs'))
    data = drawn('world.json', 'holidays', 'whiten', classes=classes)
    study = dataclasses.replace(STUDIES['paper'], data=str(data))
    assert published.sets_there(study) == ['val']*bool(classes) + ['holidays']
    with pytest.raises(ValueError, match='no folder train, so there is no in_aug'): studies.open_set(study, 'in_aug')
    checkpoint(tmp_path/'files/joint_3B_0.5.pth', kind)
    page = published.score_folder(str(tmp_path/'files'), str(data), 'resnet18', (64, 96), tmp_path/'a.html')
    said = capsys.readouterr().out
    assert "the paper's own choice" in said and page.exists() and said.count('| joint_') == 2
    assert ('val top-1' in said) == bool(classes) and 'holidays' in said and 'ukbench |' not in said

def test_a_folder_of_classes_has_both_parts(tmp_path):
    from multigrain import studies
    for c in 'ab':
        (tmp_path/c).mkdir()
        for i in range(5): Image.new('RGB', (40, 30), (i, 99, 9)).save(tmp_path/c/f'{i}.png')
    study = dataclasses.replace(STUDIES['mini'], data=str(tmp_path), per_class=2)
    assert len(studies.open_set(study, 'val').images) == 2 and len(studies.open_set(study, 'in_aug').images)

# -- what is read and computed once --------------------------------------------------------------

def test_the_images_of_all_runs_are_hashed_once(tmp_path, monkeypatch):
    "14 runs do not read ImageNet 14 times; where the time of a file changes, it alone is read again."
    from multigrain import sets, studies
    from multigrain.launch import Place, check_contents, open_training, read_sets
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(tmp_path/'runs'))
    monkeypatch.setenv('MULTIGRAIN_CACHE', str(tmp_path/'cache'))
    (tmp_path/'data').mkdir()
    imagenet(tmp_path/'data', 3, flat=False)
    for i, o in enumerate(sorted((tmp_path/'data/train').rglob('*.JPEG'))): # no links: each has its own time
        o.unlink()
        picture(o, (i, 9, 9))
    seen, real = [], sets.content_hash
    def counted(path):
        seen.append(path)
        return real(path)
    monkeypatch.setattr(sets, 'content_hash', counted)
    study = dataclasses.replace(STUDIES['smoke'], data=str(tmp_path/'data'))
    jobs = [studies.Job(o, 0, ('val',)) for o in ('uniform p=1', 'RA p=1')]
    def begin():
        studies.share_contents(study, jobs)
        for o in jobs:
            recipe, place = studies.arm_recipe(study, o.arm, 0), Place(name=study.name)
            found = read_sets(recipe, place)
            check_contents(open_training(recipe, place, found), found)
    begin()
    assert len(seen) == 6 + 3 # train and val, once for both runs
    jobs = [studies.Job('AA p=1', 0, ('val',))]
    begin()
    assert len(seen) == 9 # a later run knows them, too
    os.utime(tmp_path/'data/train/n00000001/n00000001_0.JPEG', (1, 1))
    jobs = [studies.Job('AA p=3', 0, ('val',))]
    begin()
    assert len(seen) == 10

def test_the_plan_says_what_is_read(whole):
    study = dataclasses.replace(STUDIES['paper'], data=str(whole))
    (said,) = page.to_read(study, [1]*14)
    assert said.startswith('images: 0.0 GB of train and val are read once') and 'all 14 runs together' in said
    assert page.to_read(study, []) == page.to_read(find_study('smoke'), [1]) == []

def test_a_shortfall_is_missing(whole):
    study = dataclasses.replace(STUDIES['paper'], data=str(whole))
    assert [o.split(' images')[0] for o in page.shortfall(study)] == [
        'distractors: 100 of the 10,000', 'whiten: 200 of the 20,000']
    assert page.shortfall(find_study('smoke')) == []

# -- notebooks -----------------------------------------------------------------------------------

def function(notebook, name):
    "Source of a function of a notebook."
    cells = json.loads((ROOT/'nbs/paper'/f'{notebook}.ipynb').read_text())['cells']
    (cell,) = [s for o in cells if f'def {name}(' in (s := ''.join(o['source']))]
    (found,) = [o for o in ast.parse(cell).body if getattr(o, 'name', '') == name]
    return ast.get_source_segment(cell, found)

@pytest.mark.parametrize('notebook,name', [('table_p_star', 'finetuned'), ('ablations', 'dimensions')])
def test_networks_go_to_the_device(tmp_path, notebook, name):
    "And four processes read for a GPU."
    seen = {}
    class Net:
        dim = 64
        def to(self, device):
            seen['device'] = device
            return self
    def measured(net, *args, workers=0, **how):
        seen.update(workers=workers)
        return type('Found', (), dict(p=3., __iter__=lambda self: iter(())))()
    class St: name, data = 'mini', 'smoke'
    class One: folder = tmp_path
    (tmp_path/'model').mkdir()
    def cached(folder, kind, key, f): return f()
    world = dict(own_machine=lambda: ('cuda', 4), load=lambda file: Net(), training_sets=lambda data: [None], st=St,
                 finetune_p=measured, measure_set=measured, cached=cached, opened={'a': None}, Row=tuple, s0=32)
    exec(function(notebook, name), world)
    world[name](One, 'a')
    assert seen == dict(device='cuda', workers=4)

def test_smaller_batches_are_accepted_as_they_are_printed(tmp_path):
    "Three sizes of two arms, each with groups that fit."
    from multigrain.recipe import make_recipe
    from multigrain.studies import smaller
    for study in (find_study('paper', str(tmp_path)), find_study('mini'), find_study('tiny')):
        for part in (8, 4, 2):
            for arm in ('uniform p=1', 'RA p=1'):
                words = dict(zip(*[iter(shlex.split(smaller(study, arm, part))[3:])]*2))
                given = {k[2:]: json.loads(v) if v[0] in '[0123456789.tf' and k != '--data' else v
                         for k, v in words.items() if k != '--name'}
                found = make_recipe(**given)
                assert found.batch_size == make_recipe(study.preset, **study.common | dict(data='x')).batch_size//part
                assert found.group <= found.batch_size

@pytest.mark.parametrize('name,words', [('figure_5', '(judged: between 50 and 60 %)'),
                                        ('forward_time', '(judged: between 4.5 and 5.5 times)')])
def test_committed_verdicts_are_in_the_words_of_the_code(name, words):
    "A result that was measured earlier is judged as the notebook judges now."
    claim = json.loads((ROOT/f'data/paper/mini/{name}.json').read_text())['claims'][0]
    assert words in claim['claim'] and words in (ROOT/f'nbs/paper/{name}.ipynb').read_text()
    assert claim['verdict'] == dict(figure_5='outside', forward_time='inconclusive')[name]
