"""The 3D U-Net (KiTS19) training workload: one specification, any data loader.

Programs, each with ``--help``: ``python -m unet3d.phantom``, ``.preprocess``,
``.train`` and ``.evaluate``; ``unet3d.bench`` measures loaders: ``.compare``,
``.plot``, ``.accuracy``.
"""
