/* The tile registers of AMX. */
#ifndef DRAGOMAN_AMX_H
#define DRAGOMAN_AMX_H

#include "form.h"

/* Rows of a register, each of up to 64 bytes. */
#define REGISTER_ROWS 16

typedef struct {
    int rows, row_bytes;
} tile_shape;

INLINE void configure_tiles(const tile_shape shapes[8])
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } registers = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        registers.row_bytes[i] = (uint16_t)shapes[i].row_bytes;
        registers.rows[i] = (uint8_t)shapes[i].rows;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(registers));
}

#endif
