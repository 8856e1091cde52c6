/* The scan for any processor. */
#include "growth.h"

#define SCAN vg_scan_portable
#define INSTRUCTIONS "portable"
#include "scan.h"
