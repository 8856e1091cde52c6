// Runs the machine-independent code that NVIDIA's compiler emits (PTX), one warp of 32 lanes at a time.
//
// ptx_device.py translates the text: every operand is a register, constants and parameters too. Lanes share one program
// counter until they part at a branch; then those that are furthest behind go first, so that they meet again where
// their ways join. An exchange between lanes that are not all there, or an address outside the given memory, ends the
// run with an error, as it would be undefined on a device.

#include <stdint.h>
#include <string.h>

enum { LANES = 32, OPERANDS = 9, GUARD = 7, NEGATED = 8 };

typedef struct { int32_t op, o[OPERANDS]; } Instruction;   // o[GUARD]: register of the guard or -1; o[NEGATED]: of @!
typedef uint64_t Lanes[LANES];
typedef struct { uint64_t begin, end; } Range;

#define FOR_ACTIVE for (int l = 0; l < LANES; ++l) if (mask >> l & 1)
// The statement once for whole warps, which compilers turn into vectors, and once for some of the lanes.
#define EACH(...) do { \
        if (mask == 0xffffffffu) for (int l = 0; l < LANES; ++l) __VA_ARGS__ \
        else FOR_ACTIVE __VA_ARGS__ \
    } while (0)
#define TRACE(what) (*trace = (*trace ^ (uint64_t)(what)) * 0x100000001b3u)
#define D r[in->o[0]][l]
#define A r[in->o[1]][l]
#define B r[in->o[2]][l]
#define C r[in->o[3]][l]
#define SET(value) EACH({ D = (value); })
#define OP(name) case name:

enum Op {
    MOV, NOT32, NOT_PRED, NEG32, AND, OR, XOR, SHL32, SHL64, SHR_U32, SHR_U64, SHR_S32, ADD32, ADD64, SUB32, SUB64, MUL32,
    MUL64, MUL_WIDE_U32, MUL_WIDE_S32, MAD32, SELECT, LOW32, SIGN32, EQ, NE, LT_U, LE_U, GT_U, GE_U, LT_S32, LE_S32,
    GT_S32, GE_S32, ADD_CC, ADDC_CC, ADDC, MAD_LO_CC, MADC_LO_CC, MADC_HI_CC, LOAD32, LOAD64, LOAD_V4, STORE32,
    STORE_V4, SHUFFLE, BALLOT, BRANCH, RETURN, NOTHING
};

enum Error { FINE, OUTSIDE_MEMORY, LANES_MISSING, UNKNOWN_OP, TOO_LONG, UNALIGNED };

static int allowed(const Range* ranges, int n, uint64_t at, unsigned size) {
    for (int i = 0; i < n; ++i)
        if (at >= ranges[i].begin && at + size <= ranges[i].end) return 1;
    return 0;
}

// Runs one warp to its end. r: registers, already holding constants, parameters and places of the threads.
// Returns an Error; *trace becomes a hash of it, of all places in the code and of all addresses, in order.
int ptx_run_warp(const Instruction* code, Lanes* r, uint32_t live, const Range* ranges, int n_ranges, uint64_t limit,
                 uint64_t* trace) {
    int32_t pc[LANES], here = 0;
    uint64_t carry[LANES] = {0}, steps = 0;
    uint32_t at = live;   // those that are here: all that live, until they part
    while (live) {
        if (++steps > limit) return TOO_LONG;
        const Instruction* in = code + here;
        TRACE(here);
        uint32_t mask = at;
        if (in->o[GUARD] >= 0) {
            uint32_t holds = 0;
            for (int l = 0; l < LANES; ++l) holds |= (uint32_t)(r[in->o[GUARD]][l] != 0) << l;
            mask &= in->o[NEGATED] ? ~holds : holds;
        }
        int32_t next = here + 1;
        switch (in->op) {
            OP(MOV) SET(A); break;
            OP(NOT32) SET((uint32_t)~A); break;
            OP(NOT_PRED) SET(!A); break;
            OP(NEG32) SET((uint32_t)-A); break;
            OP(AND) SET(A & B); break;
            OP(OR) SET(A | B); break;
            OP(XOR) SET(A ^ B); break;
            OP(SHL32) SET((uint32_t)B > 31 ? 0 : (uint32_t)(A << (uint32_t)B)); break;
            OP(SHL64) SET((uint32_t)B > 63 ? 0 : A << (uint32_t)B); break;
            OP(SHR_U32) SET((uint32_t)B > 31 ? 0 : (uint32_t)A >> (uint32_t)B); break;
            OP(SHR_U64) SET((uint32_t)B > 63 ? 0 : A >> (uint32_t)B); break;
            OP(SHR_S32) SET((uint32_t)((int32_t)A >> ((uint32_t)B > 31 ? 31 : (uint32_t)B))); break;
            OP(ADD32) SET((uint32_t)(A + B)); break;
            OP(ADD64) SET(A + B); break;
            OP(SUB32) SET((uint32_t)(A - B)); break;
            OP(SUB64) SET(A - B); break;
            OP(MUL32) SET((uint32_t)(A * B)); break;
            OP(MUL64) SET(A * B); break;
            OP(MUL_WIDE_U32) SET((uint64_t)(uint32_t)A * (uint32_t)B); break;
            OP(MUL_WIDE_S32) SET((uint64_t)((int64_t)(int32_t)A * (int32_t)B)); break;
            OP(MAD32) SET((uint32_t)(A * B + C)); break;
            OP(SELECT) SET(C ? A : B); break;
            OP(LOW32) SET((uint32_t)A); break;
            OP(SIGN32) SET((uint64_t)(int64_t)(int32_t)A); break;
            OP(EQ) SET(A == B); break;
            OP(NE) SET(A != B); break;
            OP(LT_U) SET(A < B); break;
            OP(LE_U) SET(A <= B); break;
            OP(GT_U) SET(A > B); break;
            OP(GE_U) SET(A >= B); break;
            OP(LT_S32) SET((int32_t)A < (int32_t)B); break;
            OP(LE_S32) SET((int32_t)A <= (int32_t)B); break;
            OP(GT_S32) SET((int32_t)A > (int32_t)B); break;
            OP(GE_S32) SET((int32_t)A >= (int32_t)B); break;
            OP(ADD_CC) EACH({ uint64_t s = A + B; carry[l] = s >> 32; D = (uint32_t)s; }); break;
            OP(ADDC_CC) EACH({ uint64_t s = A + B + carry[l]; carry[l] = s >> 32; D = (uint32_t)s; }); break;
            OP(ADDC) EACH({ D = (uint32_t)(A + B + carry[l]); }); break;
            OP(MAD_LO_CC) EACH({ uint64_t s = (uint32_t)(A * B) + C; carry[l] = s >> 32; D = (uint32_t)s; }); break;
            OP(MADC_LO_CC) EACH({
                uint64_t s = (uint32_t)(A * B) + C + carry[l];
                carry[l] = s >> 32;
                D = (uint32_t)s;
            }); break;
            OP(MADC_HI_CC) EACH({
                uint64_t s = (A * B >> 32) + C + carry[l];
                carry[l] = s >> 32;
                D = (uint32_t)s;
            }); break;
            OP(LOAD32) OP(LOAD64) OP(LOAD_V4) {   // last operand: the address; o[6]: a constant added to it
                unsigned size = in->op == LOAD32 ? 4 : in->op == LOAD64 ? 8 : 16, place = in->op == LOAD_V4 ? 4 : 1;
                FOR_ACTIVE {
                    uint64_t from = r[in->o[place]][l] + (int64_t)in->o[6];
                    TRACE(from);
                    if (!allowed(ranges, n_ranges, from, size)) return OUTSIDE_MEMORY;
                    if (from % size) return UNALIGNED;
                    if (in->op == LOAD64) memcpy(&r[in->o[0]][l], (void*)from, 8);
                    else for (unsigned k = 0; k < size / 4; ++k) {
                        uint32_t word;
                        memcpy(&word, (char*)from + 4 * k, 4);
                        r[in->o[k]][l] = word;
                    }
                }
            } break;
            OP(STORE32) OP(STORE_V4) {   // first operand: the address
                unsigned size = in->op == STORE32 ? 4 : 16;
                FOR_ACTIVE {
                    uint64_t to = r[in->o[0]][l] + (int64_t)in->o[6];
                    TRACE(to);
                    if (!allowed(ranges, n_ranges, to, size)) return OUTSIDE_MEMORY;
                    if (to % size) return UNALIGNED;
                    for (unsigned k = 0; k < size / 4; ++k) {
                        uint32_t word = (uint32_t)r[in->o[1 + k]][l];
                        memcpy((char*)to + 4 * k, &word, 4);
                    }
                }
            } break;
            OP(SHUFFLE) {   // value | is_inside, of, lane, clamp and segments, members
                uint32_t value[LANES];
                FOR_ACTIVE { value[l] = (uint32_t)r[in->o[2]][l]; if ((uint32_t)r[in->o[5]][l] & ~mask) return LANES_MISSING; }
                FOR_ACTIVE {
                    uint32_t control = (uint32_t)r[in->o[4]][l], segment = control >> 8 & 31, clamp = control & 31;
                    uint32_t most = (l & segment) | (clamp & ~segment & 31);
                    uint32_t from = (l & segment) | ((uint32_t)r[in->o[3]][l] & ~segment & 31);
                    int inside = from <= most;
                    r[in->o[0]][l] = value[inside ? from : (uint32_t)l];
                    if (in->o[1] >= 0) r[in->o[1]][l] = inside;
                }
            } break;
            OP(BALLOT) {
                uint32_t votes = 0;
                FOR_ACTIVE { votes |= (uint32_t)(A != 0) << l; if ((uint32_t)B & ~mask) return LANES_MISSING; }
                SET(votes);
            } break;
            OP(BRANCH) OP(RETURN) break;
            OP(NOTHING) break;
            default: return UNKNOWN_OP;
        }
        if (in->op == RETURN) live &= ~mask;
        if (in->op == BRANCH && at == live && mask == live) next = in->o[0];
        else if (at != live || (in->op == BRANCH && mask)) {   // parted, or parting
            for (int l = 0; l < LANES; ++l) if (at >> l & 1) pc[l] = in->op == BRANCH && (mask >> l & 1) ? in->o[0] : next;
            next = INT32_MAX;
            for (int l = 0; l < LANES; ++l) if ((live >> l & 1) && pc[l] < next) next = pc[l];
            at = 0;
            for (int l = 0; l < LANES; ++l) at |= (uint32_t)((live >> l & 1) && pc[l] == next) << l;
        }
        here = next;
    }
    return FINE;
}
