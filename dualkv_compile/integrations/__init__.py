"""What training frameworks need beyond ``torch.compile(model, backend="dualkv")``."""
