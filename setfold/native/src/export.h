/* PUBLIC functions can be called from Python; all others are hidden (-fvisibility=hidden). */

#ifndef SETFOLD_EXPORT_H
#define SETFOLD_EXPORT_H

#ifdef _WIN32
#define PUBLIC __declspec(dllexport)
#else
#define PUBLIC __attribute__((visibility("default")))
#endif

/* KERNEL(name) is the public function `name` for one instruction set, such as name_v3. */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define KERNEL(name) PUBLIC int JOIN(name, ISA)

/* What a kernel returns. */
enum { DONE = 0, NO_MEMORY = 1, NOT_FINITE = 2 };

#endif
