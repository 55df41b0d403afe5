"""tmp"""
class ShmWeightReader: pass
class ShmWeightWriter:
    def __init__(self,h): pass
