/* Call one kernel of a library: driver LIBRARY FUNCTION FILE.
 *
 * FILE has, for each argument, its kind and an int64: 'i' the integer itself, 'n' NULL, 'b' the
 * number of bytes of a buffer, which follow; 'f' the bits of a float, of which there is at most one.
 * The buffers are written back to FILE, one after the other.
 *
 * All arguments are passed as int64, as the calling convention of 64-bit Arm on Linux allows: an
 * int takes as much room, and a float has registers of its own.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 16
typedef int64_t I;
typedef int (*Kernel)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, float);

int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW);
    if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 100;
    Kernel kernel = (Kernel)dlsym(library, words[2]);
    if (kernel == NULL) return 101;
    FILE *file = fopen(words[3], "rb");
    I a[MOST] = {0}, sizes[MOST] = {0};
    float number = 0;
    int used = 0, kind;
    while ((kind = fgetc(file)) != EOF) {
        I value;
        if (fread(&value, sizeof value, 1, file) != 1 || used == MOST) return 102;
        if (kind == 'f') {
            memcpy(&number, &value, sizeof number);
            continue;
        }
        a[used] = kind == 'i' ? value : 0;
        if (kind == 'b') {
            a[used] = (I)malloc(value);
            sizes[used] = value;
            if (fread((void *)a[used], 1, value, file) != (size_t)value) return 103;
        }
        used++;
    }
    fclose(file);
    int result = kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
                        a[12], a[13], a[14], a[15], number);
    file = fopen(words[3], "wb");
    for (int i = 0; i < used; i++) fwrite((void *)a[i], 1, sizes[i], file);
    return fclose(file) ? 104 : result;
}
