"""The lazy tensor: protocol, element types, the closed set of nodes, how a byte range is evaluated, the tile cache."""
