// The number that ties the native libraries to the Python side: ddtree_trt/plugins/__init__.py holds the same one.
// Raise it in both places whenever a structure of launch.h, attention.h or round.h, an exported function, a plugin's
// tensors or attributes, what it stores in a plan, or the workspace it asks for change: plans are bound to this number,
// not to one build of the library.
#pragma once

#define DDTREE_ABI 6

#define DDTREE_TEXT_OF(x) #x
#define DDTREE_TEXT(x) DDTREE_TEXT_OF(x)

// Every library contains this text, so that its ABI can be read from the file before any of its code runs.
#define DDTREE_ABI_MARKER "ddtree-plugin-abi=" DDTREE_TEXT(DDTREE_ABI) ";"
