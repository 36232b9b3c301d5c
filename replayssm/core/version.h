// The library's version, for the preprocessor and for programs.
#pragma once

#define REPLAYSSM_VERSION_MAJOR 0
#define REPLAYSSM_VERSION_MINOR 1
#define REPLAYSSM_VERSION_PATCH 0
#define REPLAYSSM_VERSION "0.1.0"
