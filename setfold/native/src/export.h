/* PUBLIC functions can be called from Python; all others are hidden (-fvisibility=hidden). */

#ifndef SETFOLD_EXPORT_H
#define SETFOLD_EXPORT_H

#ifdef _WIN32
#define PUBLIC __declspec(dllexport)
#else
#define PUBLIC __attribute__((visibility("default")))
#endif

#endif
