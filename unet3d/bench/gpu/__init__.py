"""How many cores a GPU needs: the training of the 3D U-Net with every loader, as one command.

    python -m unet3d.bench.gpu --budget 12m
    python -m unet3d.bench.gpu --budget 2h --for 9m       # repeat it: it continues
    python -m unet3d.bench.gpu --report runs/gpu/gpu.json # tables and plot of the results so far
    python -m unet3d.bench.gpu --dry-run                  # every row, tiny, without a GPU

It makes its data, and then runs row after row of a fixed list, the most important first (see
plan.py), each in a separate process: loaders x cores x precision x batch size, three repeats that
take turns. The main contenders and the upper bounds, with one number of cores, are first: 12
minutes are meant for these. Then come a trainer that computes in Python half of its time, data
that does not fit into memory, two processes on one GPU, the detection and speech workloads, and the
loader benchmarks with more workers. Each row is written to OUT/gpu.json when it ends. A call that
is cut, by --for, --budget, a signal or a crash, loses only the current row, and the same call
continues. No row starts that is expected to end after the budget; the report names the rows left
out. A loader that fails has a row that says so. The report lists what cannot be measured on this
machine.

Fairness: every contender has the same number of cores, by affinity, the same number of workers or
threads, and the same epochs of the same samples, of which the first is left out. Timed rows compute
no hashes of bytes; separate rows compare those. Warm rows record how much of their data was in
the page cache (mincore). Figures are medians over all counted epochs of all repeats.

Exit status: 0 nothing is left to do, 1 something is missing or wrong (a row, with --dry-run), 3 cut
by --for: call again.

`make gpu` does everything, including set-up. If no package index is reachable, this needs a Python
with torch, numpy, scipy and tqdm, its headers, and a C compiler. Without pillow the detection rows
say so, without matplotlib there is no plot, without nvidia-ml-py no GPU use. DALI is left out if it
is not installed, and without nvcc operators run on the host. In the source tree:

    python3 setup.py -q build_ext --inplace && python3 -m unet3d.bench.gpu --for 9m

On a machine that is rented for single commands and starts empty each time, copy OUT (gpu.json,
small) back and forth, leave the data on the machine, and pass the commit if git does not know it. A
file continues only on the same kind of machine:

    ... && python3 -m unet3d.bench.gpu --for 8m --out runs/gpu --work /tmp/gpu --commit NAME
"""