"The folders of the whole paper, as a lab has them: what is read, what is refused before anything starts, what goes on."
import dataclasses, json, os, struct
from pathlib import Path

import numpy as np, pytest
from PIL import Image
from multigrain import page
from multigrain.catalog import open_benchmark
from multigrain.datasets import training_sets
from multigrain.studies import STUDIES, find_study, notebooks, set_title, wanted_jobs

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
    for o in files:
        o.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, o)

def imagenet(root, n, flat=True, train='train', val='val'):
    "ImageNet with n classes, two training images and one validation image of each."
    source, wnids = picture(root/'source.jpg', (9, 99, 200)), [f'n{i:08}' for i in range(n)]
    for o in wnids: link(source, *(root/train/o/f'{o}_{i}.JPEG' for i in range(2)))
    numbers = np.random.default_rng(0).permutation(n) # the devkit has another order than the names
    names = [f'ILSVRC2012_val_{i + 1:08}.JPEG' for i in range(n)]
    link(source, *(root/val/('' if flat else wnids[k])/o for o, k in zip(names, numbers)))
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
    a, b = root/'source.jpg', picture(root/'other.jpg', (200, 9, 9))
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
    from multigrain import studies
    from multigrain.model import MultiGrain
    study, net, seen, real = find_study('smoke'), MultiGrain('mini', 3., 4, seed=1).eval(), [], studies.embed
    def spy(model, images, s, *args, **more):
        seen.append(s)
        return real(model, images, s, *args, **more)
    monkeypatch.setattr(studies, 'embed', spy)
    rows = studies.network_scores(tmp_path, lambda: net, study, ['holidays', 'copydays'], 'smoke')
    assert seen == [32, 48]
    alone = studies.measure_set(net, study, 'copydays', 48, studies.open_set(study, 'copydays'))
    assert [o for o in rows if (o.set, o.s) == ('copydays', 48)] == alone
    assert json.loads((tmp_path/'scores.json').read_text())['notes']['holidays']
