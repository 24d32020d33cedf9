"""The contract of torch.utils.data.DataLoader, tested on torch's class and on minato's."""
