"""How many cores a GPU needs: the training of the 3D U-Net with every loader, as one command.

    python -m unet3d.bench.gpu --budget 40m
    python -m unet3d.bench.gpu --budget 40m --for 9m      # again and again: it goes on
    python -m unet3d.bench.gpu --report runs/gpu/gpu.json # tables and plot of what is there
    python -m unet3d.bench.gpu --dry-run                  # every row, tiny, without a GPU

It makes its data, and then runs row after row of a fixed list, the most telling first (see
plan.py), each a process of its own: loaders x cores x precision x batch size, three repeats that
take turns; then a trainer that computes in Python half of its time, data that does not fit the
memory, two processes on one GPU, the detection and speech workloads, and the loader benchmarks
with more workers. Each row is written to OUT/gpu.json when it ends. A call that is cut, by --for,
--budget, a signal or a crash, loses the row under way only, and the same call goes on. A loader
that fails has a row that says so. What cannot be measured here is said in the report.

Fair: every contender has the same number of cores, by affinity, and as many workers or threads,
the same epochs of the same samples, of which the first is left out, and no hashes of bytes in
timed rows: those are compared in rows of their own. Warm rows note how much of their data was in
the page cache (mincore). Figures are medians over all epochs counted, of all repeats.

Exit status: 0 nothing is left to do, 1 something is missing or wrong (a row, of --dry-run), 3 cut
by --for: call again.

`make gpu` does all, set-up included. Where no package index is in reach this needs a Python with
torch, numpy, scipy and tqdm, its headers, and a C compiler. Without pillow the detection rows say
so, without matplotlib there is no plot, without nvidia-ml-py no GPU use; DALI is left out where it is
not installed, and without nvcc operators run on the host. In the source tree:

    python3 setup.py -q build_ext --inplace && python3 -m unet3d.bench.gpu --for 9m

On a machine that is lent by the command, and bare each time, keep OUT (gpu.json, small) and bring
it along, leave the data where they vanish, and name the commit where git does not know it; a file
goes on only on the same kind of machine:

    ... && python3 -m unet3d.bench.gpu --for 8m --out runs/gpu --work /tmp/gpu --commit NAME
"""
